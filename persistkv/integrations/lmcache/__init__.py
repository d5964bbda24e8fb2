"""A second level of LMCache. ``adapter`` is the module that its configuration names."""
