"""Payloads in segment files: allocator, gathered I/O, files, and the choice between extents and LMDB values."""
