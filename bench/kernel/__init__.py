"""Kernels by themselves: their times beside the device's limits and peers', their tuning, and compute-sanitizer."""
