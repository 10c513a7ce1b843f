"""Benchmarks: run from a checkout as `jaxspec bench` or `python -m bench`; results lie in `bench/results/`."""
