"""How bytes move between an engine's KV tensors and the primary tier's rows, one strategy a kind of device."""
