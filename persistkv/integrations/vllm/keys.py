"""Keys of a context whose token ids are known, computed with vLLM's own functions for block hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from persistkv.base import OffloadKey, make_offload_key


def context_keys(
    offloading: Any, hash_algorithm: str, token_ids: Sequence[int], cache_salt: str | None
) -> list[OffloadKey]:
    """Return the keys of a context's full chunks, in token order, one KV cache group after the other.

    The keys equal those of a request with this prompt, without LoRA and without multimodal inputs. Runs in the engine's
    process, where vLLM has drawn the seed of its hashes; takes as long as the hashing of a request's prompt.

    :param offloading: vLLM's ``OffloadingConfig``.
    :param hash_algorithm: vLLM's ``prefix_caching_hash_algo``.
    :param cache_salt: the ``cache_salt`` of the context's requests.
    """
    from vllm import SamplingParams
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request

    hash_tokens = offloading.cache.tokens_per_hash
    hash_function = get_hash_fn_by_name(hash_algorithm)
    request = Request(
        request_id="persistkv-prefetch",
        prompt_token_ids=list(token_ids),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        cache_salt=cache_salt,
        block_hasher=get_request_block_hasher(hash_tokens, hash_function),
    )
    keys = []
    for group in offloading.groups:
        chunk_tokens = group.tokens_per_block * offloading.cache.blocks_per_chunk
        for end in range(chunk_tokens, len(token_ids) + 1, chunk_tokens):
            keys.append(make_offload_key(bytes(request.block_hashes[end // hash_tokens - 1]), group.group_id))
    return keys
