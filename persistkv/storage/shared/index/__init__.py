"""The index of one namespace: reading, merging, sweeping, and the totals of a store."""
