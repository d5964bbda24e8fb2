"""The API for engines: the scheduler's side, which plans transfers, and the worker's side, which
runs them."""
