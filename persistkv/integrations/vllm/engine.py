"""Configuration, release, platform and geometry of the vLLM process."""

from __future__ import annotations

import inspect
import platform
from types import FrameType
from typing import Any

from persistkv.errors import ConfigurationError

_CPU_FLAGS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "sve", "bf16")
"""CPU flags by which vLLM selects its kernels, and with them the order of bytes in a block."""


def find_vllm_config() -> Any:
    """Return the ``VllmConfig`` of the engine that is being built.

    vLLM passes a secondary tier a summary without weights and RoPE. The full configuration is in the callers further up
    the stack: the connector, the scheduler, the engine.

    :raises ConfigurationError: no caller on the stack has one.
    """
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    frame = inspect.currentframe()
    while current is None and frame is not None:
        current = _config_in(frame, VllmConfig)
        frame = frame.f_back
    if current is None:
        expected = "to be found up the stack: without it nobody can tell whose bytes these are"
        raise ConfigurationError("vLLM's configuration", None, expected)
    return current


def _config_in(frame: FrameType, kind: type) -> Any:
    values = list(frame.f_locals.values())
    values += [getattr(frame.f_locals.get("self"), name, None) for name in ("vllm_config", "_vllm_config")]
    return next((value for value in values if isinstance(value, kind)), None)


def engine_facts() -> dict[str, Any]:
    """Return the release without its last number, and the device; for a CPU also its type and flags."""
    import vllm
    from vllm.platforms import current_platform

    release = ".".join(str(vllm.__version__).split(".")[:2])
    device = str(current_platform.device_type)
    facts: dict[str, Any] = {"name": "vllm", "release": release, "device": device}
    if device == "cpu":
        facts["cpu"] = {"machine": platform.machine(), "flags": _cpu_flags()}
    return facts


def _cpu_flags() -> list[str]:
    try:
        with open("/proc/cpuinfo") as lines:
            flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    except OSError:
        flags = ""
    return sorted(set(_CPU_FLAGS).intersection(flags.split()))


def fixes_hash_seed() -> bool:
    """Return whether this vLLM release fixes the seed of cryptographic block hashes if the environment sets none."""
    from vllm.v1.core import kv_cache_utils

    return hasattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED")


def chunk_tokens(offloading: Any) -> tuple[int, ...]:
    """Return the tokens of one chunk for each group index that a key may have: all groups of vLLM, offloaded or not.

    :param offloading: vLLM's ``OffloadingConfig``.
    """
    chunk = offloading.cache.blocks_per_chunk
    tokens: dict[int, int] = {group.group_id: group.tokens_per_block * chunk for group in offloading.groups}
    first = next(iter(tokens.values()))
    return tuple(tokens.get(index, first) for index in range(max(tokens) + 1))
