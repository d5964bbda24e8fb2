"""A store's LMDB environment: opened once per process, with transactions, locks and error translation."""
