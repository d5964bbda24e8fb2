"""A storage backend of SGLang's HiCache. ``backend`` is the module that its configuration names."""
