"""What the benchmarks share: records, timing, latencies, checkpoints written while they are made."""
