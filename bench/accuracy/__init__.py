"""What is computed: agreement with PyTorch, with vLLM's drafts, and of speculation with plain decoding."""
