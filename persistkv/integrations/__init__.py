"""Engines that persistkv is built into."""
