"""Sizes of indexers in published models."""

HEAD_DIM = 128
HEADS = {"deepseek-v3.2": 64, "glm-5": 32}
# Keys that a query reads.
COUNT = 2048
