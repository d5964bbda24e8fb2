"""Server in the host: the event loop that serves an engine's store.

``event_loop`` runs until the engine ends. ``session`` serves an open store: ``jobs`` runs the
engine's jobs, ``publishing`` sends it the changes, ``status_publisher`` its status to others.
``channel`` is the host's end of the connection, and ``child`` the program of the host process.
"""
