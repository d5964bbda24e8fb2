"""Formats of bytes at rest: packs, manifests, key tables and codecs."""
