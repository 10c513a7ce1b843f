"""Whole steps: decode steps and speculative cycles, late readout, and pictures of step logs."""
