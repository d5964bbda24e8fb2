"""Hosts of a store: a process of its own (default), a thread, or the caller's thread.

``client`` runs in the engine and ``server`` in the host. ``protocol`` defines the messages between
them, ``connection`` their transport. ``supervisor`` starts, watches and restarts the host, and
``child`` is the program of the host process.
"""
