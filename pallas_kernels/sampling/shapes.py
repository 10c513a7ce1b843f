"""Vocabularies of published models, and the row counts that are measured."""

VOCABULARIES = {"deepseek-v3": 129280, "qwen3": 151936, "moonlight": 163840}
ROWS = (1, 8, 32, 128, 512)
