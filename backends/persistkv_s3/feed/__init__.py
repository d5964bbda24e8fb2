"""The feed of a namespace: one order of all commits, which every engine applies to its local catalogue."""
