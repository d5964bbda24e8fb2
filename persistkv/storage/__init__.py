"""Bytes at rest: identity, codecs, packs, manifests, the index, backends, and the store that joins them. No torch."""
