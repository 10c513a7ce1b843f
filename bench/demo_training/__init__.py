"""Training of the embedded demo model and its EAGLE3 heads: `python -m bench.demo_training --out DIR`."""
