"""The demo: a process answers and is killed, the next one answers warm. ``persistkv demo``."""
