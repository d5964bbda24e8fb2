"""Where the bytes of packs are: in segment files or in LMDB, and how their space is divided."""
