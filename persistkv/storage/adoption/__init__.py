"""Adoption: content of another engine release's namespace is used after a comparison of bytes has proven it valid."""
