"""Which block leaves the primary tier next: one interface, LRU and ARC, and a registry for others."""
