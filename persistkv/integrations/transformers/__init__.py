"""A small engine for Hugging Face models. Needs the extra ``persistkv[transformers]``."""
