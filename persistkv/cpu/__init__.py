"""The primary tier: rows of CPU memory that the worker copies KV blocks to and from, their
protection and eviction."""
