"""Benchmarks. Run one with ``python -m benchmarks.NAME``; it prints medians, and ratios within one
run."""
