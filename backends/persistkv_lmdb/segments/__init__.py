"""Payload storage in segment files: allocator, vectored I/O, files, and the choice between extents and LMDB values."""
