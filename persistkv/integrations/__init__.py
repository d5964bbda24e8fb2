"""Integrations of persistkv into inference engines."""
