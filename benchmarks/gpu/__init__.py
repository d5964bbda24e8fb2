"""Benchmarks for a machine with a GPU; ``run.sh`` runs them. ``--smoke --device cpu`` runs their code without one."""
