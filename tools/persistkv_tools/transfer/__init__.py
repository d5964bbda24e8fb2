"""Commands that copy contexts between stores and files."""
