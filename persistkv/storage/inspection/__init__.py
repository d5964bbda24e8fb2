"""Inspection of a store while engines use it: its requests, namespaces and totals."""
