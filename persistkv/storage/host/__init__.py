"""Where a store runs: a process of its own (default), a thread, or the caller's own stack.

``client`` is the engine's side, ``server`` the store's side, ``protocol`` the messages between them and
``connection`` what carries them. ``supervisor`` starts, watches and restarts the store's side, ``child`` is the
program of that process, ``replica`` the engine's copy of the index.
"""
