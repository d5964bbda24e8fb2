"""Differences between the supported releases of vLLM, 0.31 to 0.33. The rest of the plugin uses what all of them have.

Hooks that only newer releases call need nothing here: older ones ignore the method or the argument.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from persistkv.base import OffloadKey

Position = Callable[[OffloadKey], "int | None"]
"""Function from a key to its position: tokens of the request up to the end of the key's chunk; None if unknown."""


def key_position(context: Any) -> Position | None:
    """Return vLLM's function from a key of the request to its position; None if this release of vLLM has none.

    :param context: vLLM's ``ReqContext``.
    """
    return getattr(context, "get_offload_key_position", None)


def fixes_hash_seed() -> bool:
    """Return whether this release fixes the seed of cryptographic block hashes if the environment sets none."""
    from vllm.v1.core import kv_cache_utils

    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def hint_actions(context: Any) -> Sequence[Any]:
    """Return the ``KvHintAction`` objects of a ``ReqContext``; empty without hints, as in releases that lack them."""
    envelope = getattr(context, "kv_hints", None)
    return () if envelope is None else envelope.actions
