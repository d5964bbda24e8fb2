"""Forgetting of tenants in a shared store."""
