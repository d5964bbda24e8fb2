"""Checks of a store's files and rows, and a new catalogue from the segment files."""
