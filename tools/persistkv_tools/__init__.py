"""The `persistkv` command."""
