"""Hosts of a store: a process of its own (default), or a thread of the engine.

``client`` runs in the engine; ``supervisor`` starts, watches and restarts the host. ``server`` is
what runs in the host. ``protocol`` defines the messages between the two, ``connection`` their
transport.
"""
