"""persistkv keeps the KV cache of LLM inference on durable storage.

Importing it imports neither torch nor transformers.
"""

from persistkv.errors import PersistKVError

__version__ = "0.1.0"

__all__ = ["PersistKVError", "__version__"]
