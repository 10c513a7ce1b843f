"""Sizes of indexers in published models."""

HEAD_DIM = 128
HEADS = {"deepseek-v3.2": 64, "glm-5": 32}
# Keys that a query reads.
COUNT = 2048
# Requests, and cached tokens of each.
CONTEXTS = ((1, 32768), (8, 32768), (32, 4096), (32, 16384), (32, 32768), (128, 8192))
