"""Where a store runs: a process of its own (default), a thread, or the caller's own stack.

``client`` is the engine's side, ``server`` the store's side, ``protocol`` what passes between them, ``launch`` the
three ways to start the store's side, ``side`` its life as the engine sees it, ``child`` the program of the process,
``watching`` when it is given up and when it is started again.
"""
