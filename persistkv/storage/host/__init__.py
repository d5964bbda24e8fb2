"""Hosts of a store: a process of its own (default), or a thread of the engine.

``client`` runs in the engine and ``server`` in the host. ``protocol`` defines the messages between
them, ``connection`` their transport. In the host, ``session`` serves an open store: ``jobs`` runs
the engine's jobs, ``publishing`` sends it what changed. ``supervisor`` starts, watches and restarts
the host, and ``child`` is the program of the host process.
"""
