"""Benchmarks for a machine with a GPU, run by ``run.sh``. ``--smoke --device cpu`` runs their code
without a GPU."""
