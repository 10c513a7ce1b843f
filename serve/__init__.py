"""The HTTP server (OpenAI's protocol) and the command line. Knows text and requests, nothing of kernels or models."""
