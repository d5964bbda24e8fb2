"""Copies between an engine's KV tensors and the primary tier's rows: one strategy per kind of
device."""
