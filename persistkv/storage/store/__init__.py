"""An open store: accepted blocks become packs and commits, reads fill rows, an index knows the
durable keys.

``store.Store`` is the entrance, for callers with an event loop; ``blocking`` is for the others.
"""
