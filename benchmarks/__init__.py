"""Measurements, each a module: ``python -m benchmarks.NAME``. They print medians, and ratios within one run."""
