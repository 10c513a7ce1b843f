"""Kernels for paged attention and mixtures of experts: one folder per operation.

Each folder has `api.py` (the public function: shapes, dtypes, checks) and `reference.py` (plain XLA, the oracle that
every other implementation answers to).
"""
