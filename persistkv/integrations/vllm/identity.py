"""The identity of KV bytes in vLLM, from its configuration.

A model's path or name is recorded and need not match; the bytes of its weights must. vLLM's release
is part of the identity, because the meaning of a block's bytes is internal to vLLM and changes
without notice.
"""

from __future__ import annotations

import inspect
import logging
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from persistkv.errors import ConfigurationError, MissingOptionError, first_line
from persistkv.integrations.model_config import dtype_name, plain, plain_config
from persistkv.storage.identity import MODEL_NAME, fingerprint_checkpoint

logger = logging.getLogger(__name__)

IDENTITY_VERSION = 1
"""Version of the fields of the identity; KV that was stored under another one is not found."""

_READABLE_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "runai_streamer")
"""Load formats for which ``fingerprint_checkpoint`` reads the files that vLLM loads."""
_SEED_VARIABLE = "PYTHONHASHSEED"
_FIXED_HASHES = ("sha256", "sha256_cbor")
"""Block hash algorithms for which vLLM uses a fixed seed if the environment does not set one."""
_CPU_FLAGS = ("amx_bf16", "amx_tile", "avx512_bf16", "avx512f", "avx2", "sve", "bf16")
"""CPU flags by which vLLM selects its kernels, and with them the order of bytes in a block."""


def find_vllm_config() -> Any:
    """Return the ``VllmConfig`` of the engine that is being built. vLLM passes tiers a summary
    without weights or RoPE; the full one is in the callers further up the stack: the connector, the
    scheduler, the engine.
    """
    from vllm.config import VllmConfig, get_current_vllm_config_or_none

    current = get_current_vllm_config_or_none()
    if current is None:
        current = _on_stack(VllmConfig, "vllm_config", "_vllm_config")
    if current is None:
        raise MissingOptionError(
            "persistkv in vLLM",
            "vLLM's configuration, which no caller on the stack has",
        )
    return current


def find_kv_cache_config() -> Any:
    """Return the ``KVCacheConfig`` of the engine that is being built; None if no caller on the
    stack has it."""
    from vllm.v1.kv_cache_interface import KVCacheConfig

    return _on_stack(KVCacheConfig, "kv_cache_config", "_kv_cache_config")


def find_executor() -> Any:
    """Return the ``Executor`` of the engine that is being built; None if no caller on the stack has
    it."""
    from vllm.v1.executor import Executor

    return _on_stack(Executor, "model_executor")


def find_engine_core() -> Any:
    """Return the ``EngineCore`` that is being built; None if no caller on the stack is one."""
    from vllm.v1.engine.core import EngineCore

    return _on_stack(EngineCore)


def find_scheduler() -> Any:
    """Return the ``Scheduler`` that calls; None if no caller on the stack is one."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return _on_stack(Scheduler)


def has_no_kv(scheduler: Any) -> bool:
    """Return whether no request of vLLM's ``Scheduler`` holds blocks in the device's memory; False
    if ``scheduler`` is None."""
    manager = getattr(scheduler, "kv_cache_manager", None)
    return getattr(manager, "usage", None) == 0


def find_worker() -> Any:
    """Return the ``WorkerBase`` that is being initialised; None if no caller on the stack is
    one."""
    from vllm.v1.worker.worker_base import WorkerBase

    return _on_stack(WorkerBase)


def _on_stack(kind: type, *attributes: str) -> Any:
    """Return an object of this type from the callers' local variables, or from these attributes of
    their ``self``; None if there is none."""
    # Search the callers, the nearest first: vLLM's constructors do not pass these objects on, and
    # offer no other way to get them.
    frame = inspect.currentframe()
    while frame is not None:
        values = list(frame.f_locals.values())
        owner = frame.f_locals.get("self")
        values += [getattr(owner, name, None) for name in attributes]
        for value in values:
            if isinstance(value, kind):
                return value
        frame = frame.f_back
    return None


def engine_facts() -> dict[str, Any]:
    """Return vLLM's release (first two numbers) and device type; for a CPU also its machine type
    and relevant flags."""
    import vllm
    from vllm.platforms import current_platform

    numbers = str(vllm.__version__).split(".")
    # leave out the third number, so that patch releases share a namespace
    release = ".".join(numbers[:2])
    device = str(current_platform.device_type)
    facts: dict[str, Any] = {"name": "vllm", "release": release, "device": device}
    if device == "cpu":
        machine = platform.machine()
        flags = set(_CPU_FLAGS).intersection(_cpu_flags())
        facts["cpu"] = {"machine": machine, "flags": sorted(flags)}
    return facts


def _cpu_flags() -> list[str]:
    """Return the flags of the first CPU; none if the kernel does not tell."""
    with suppress(OSError), open("/proc/cpuinfo") as lines:
        for line in lines:
            # names of the field on x86 and ARM
            if line.lower().startswith(("flags", "features")):
                return line.split()
    return []


class SharedLayout(NamedTuple):
    """A layout of primary-tier rows that is the same for all parallel sizes (e.g. tensor
    parallelism)."""

    kind: str
    """``canonical``: vLLM certified it for each layer. ``direct``: the workers' bytes in the order
    of their ranks."""
    num_bytes: int
    """Bytes of KV at the start of each row; the rest is padding."""


def shared_layout(spec: Any) -> SharedLayout | None:
    """Return the layout of rows if it is independent of the parallel sizes. None: these are part of
    the identity."""
    offloading = spec.config
    if getattr(offloading, "canonical_layout", False):
        return _canonical_layout(offloading)
    return _direct_layout(spec)


def _canonical_layout(offloading: Any) -> SharedLayout | None:
    """Return the layout of rows that vLLM has certified for each layer; None if it depends on the
    parallel sizes."""
    parallel = offloading.parallel
    if not parallel.is_parallelism_agnostic:
        return None
    num_bytes = _worker_bytes(offloading)
    # a row has the bytes of each worker; if all workers have the same bytes, it has them once
    if not getattr(offloading, "replicated_layout", False):
        num_bytes *= parallel.world_size
    return SharedLayout("canonical", num_bytes)


def _direct_layout(spec: Any) -> SharedLayout | None:
    """Return the layout of rows that consist of the workers' bytes; None if it depends on the
    parallel sizes.

    vLLM's ``is_parallelism_agnostic`` promises this for the bytes of one block and one layer only:
    it is set for ``LBHNC`` (layers before heads) in vLLM 0.32, although with several layers a row
    of two workers differs from that of one worker. Rows are therefore shared only if they contain
    one GPU block, heads come before layers, and there is no gap between the workers' parts.
    """
    offloading = spec.config
    parallel = offloading.parallel
    worker_bytes = _worker_bytes(offloading)
    # all workers have the same bytes, and a row has them once: it contains no order of workers and
    # no gap
    if getattr(spec, "replicated_layout", False):
        return SharedLayout("direct", worker_bytes)
    if not parallel.is_parallelism_agnostic or offloading.cache.blocks_per_chunk != 1:
        return None
    if not _are_heads_first(offloading):
        return None
    # another stride means a gap between the workers' parts
    worker_stride = getattr(spec, "cpu_page_size_per_worker", None)
    if parallel.world_size > 1 and worker_stride != worker_bytes:
        return None
    return SharedLayout("direct", worker_bytes * parallel.world_size)


def _worker_bytes(offloading: Any) -> int:
    """Return the bytes of one worker in a row: those of its GPU blocks of one chunk."""
    num_bytes: int = offloading.worker_kv_bytes_per_block
    return num_bytes * int(offloading.cache.blocks_per_chunk)


def _are_heads_first(offloading: Any) -> bool:
    """Return whether heads come before all other dimensions of a block, so that the workers' bytes
    follow each other."""
    # vLLM names the order of the dimensions: L layers, B blocks, H heads, N tokens
    layout = getattr(offloading, "kv_cache_layout", None)
    if layout is None:
        return False
    # leave out dimensions with one element, which do not affect the order of the bytes: the rows
    # have one block (``_direct_layout``), and some models have one layer
    order = str(layout).replace("B", "")
    num_layers = sum(len(group.layer_names) for group in offloading.groups)
    if num_layers == 1:
        order = order.removeprefix("L")
    return order.startswith("H")


def engine_identity(
    config: Any,
    offloading: Any,
    facts: Mapping[str, Any],
    *,
    shared: SharedLayout | None = None,
    weights: str | None = None,
    adapters: str | None = None,
) -> dict[str, Any]:
    """Return everything that must match for the engine's KV bytes to be valid, as JSON values.

    :param config: vLLM's ``VllmConfig``.
    :param offloading: vLLM's ``OffloadingConfig``.
    :param facts: see ``engine_facts``.
    :param shared: see ``shared_layout``; None makes the parallel sizes part of the identity.
    :param weights: a name that identifies the weights; None fingerprints their files.
    :param adapters: a name for the set of LoRA adapters; needed only if they are enabled.
    :raises ConfigurationError: the weights cannot be fingerprinted, or adapters are enabled and not
        named.
    """
    model = config.model_config
    lora = getattr(config, "lora_config", None)
    speculative = getattr(config, "speculative_config", None)
    return {
        "version": IDENTITY_VERSION,
        MODEL_NAME: str(model.model),
        "engine": dict(facts),
        "weights": _weights(model, config.load_config, weights),
        "code_revision": plain(getattr(model, "code_revision", None)),
        "config": plain_config(model.hf_config.to_dict()),
        "dtype": {
            "model": dtype_name(model.dtype),
            "kv": dtype_name(offloading.model.dtype),
        },
        "kv_cache": _kv_cache(config.cache_config, offloading),
        "quantization": plain(getattr(model, "quantization", None)),
        "attention": _attention(config),
        "adapters": _adapters(lora, adapters),
        "speculation": _speculation(speculative, config.load_config),
        "groups": _groups(offloading),
        "block": _block(offloading, shared),
        "world": _world(offloading, shared),
        "hash": {
            "algorithm": config.cache_config.prefix_caching_hash_algo,
            "seed": os.environ.get(_SEED_VARIABLE),
        },
    }


def _kv_cache(
    cache: Any,
    offloading: Any,
) -> dict[str, Any]:
    """Return the identity of the numbers in the KV cache: their types and their order."""
    kv_cache = _fields(
        cache,
        "cache_dtype",
        "calculate_kv_scales",
        "kv_cache_dtype_skip_layers",
        "mamba_cache_dtype",
    )
    kv_cache["layout"] = plain(getattr(offloading, "kv_cache_layout", None))
    return kv_cache


def _block(
    offloading: Any,
    shared: SharedLayout | None,
) -> dict[str, Any]:
    """Return the identity of a block's size: that of the row in a shared layout, else that of one
    worker's part."""
    block = _fields(offloading.cache, "tokens_per_hash", "blocks_per_chunk")
    if shared is None:
        block["worker_bytes"] = offloading.worker_kv_bytes_per_block
    else:
        block["bytes"] = shared.num_bytes
    return block


def _world(
    offloading: Any,
    shared: SharedLayout | None,
) -> dict[str, Any]:
    """Return the identity of the parallelism: the parallel sizes, unless rows do not depend on
    them. Engines with other sizes then find the same rows."""
    if shared is not None:
        return {"layout": shared.kind}
    sizes = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
    world = _fields(offloading.parallel, *sizes)
    world |= _fields(offloading, "replicated_layout", "canonical_layout")
    return world


def _attention(config: Any) -> dict[str, Any]:
    """Return the identity of the attention: its kernels and its window."""
    attention = getattr(config, "attention_config", None)
    backend = getattr(attention, "backend", None)
    window = getattr(config.cache_config, "sliding_window", None)
    is_disabled = getattr(config.model_config, "disable_sliding_window", False)
    return {
        # ``backend`` is an enumeration or a text
        "backend": getattr(backend, "name", plain(backend)),
        "sliding_window": plain(window),
        "window_disabled": bool(is_disabled),
    }


def _groups(offloading: Any) -> list[dict[str, Any]]:
    """Return the identity of the KV cache groups that vLLM offloads."""
    groups = []
    for group in offloading.groups:
        layers = list(group.layer_names)
        groups.append(
            {"id": group.group_id, "tokens": group.tokens_per_block, "layers": layers}
        )
    return groups


def has_random_hashes(algorithm: str) -> bool:
    """Return whether block hashes differ between starts of the engine, so that no stored block is
    found again."""
    return os.environ.get(_SEED_VARIABLE) is None and algorithm not in _FIXED_HASHES


def _weights(
    model: Any,
    load: Any,
    name: str | None,
) -> str:
    """Return what identifies the weights: their name, the seed of random ones, or the fingerprint
    of their files."""
    if name is not None:
        return f"named:{name}"
    # the format is an enumeration in some releases, and a text in others
    given_format = load.load_format
    load_format = str(getattr(given_format, "value", given_format))
    # the weights are random, and the seed determines them
    if load_format == "dummy":
        return f"dummy:{getattr(model, 'seed', None)}"
    if load_format not in _READABLE_FORMATS:
        raise _unknown_weights(f"files of load format {load_format}")
    directory = _checkpoint_directory(model, load)
    logger.info("fingerprinting the weights in %s", directory)
    return fingerprint_checkpoint(directory)


def _checkpoint_directory(model: Any, load: Any) -> Path:
    """Return the directory of the files that vLLM has loaded: the model's path, or the download of
    its name.

    :raises ConfigurationError: there is neither on this machine.
    """
    directory = Path(str(model.model))
    if directory.is_dir():
        return directory
    from huggingface_hub import snapshot_download

    try:
        # ``local_files_only`` searches earlier downloads, and downloads nothing
        found = snapshot_download(
            str(model.model),
            revision=getattr(model, "revision", None),
            cache_dir=getattr(load, "download_dir", None),
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        what = f"no files on this machine ({first_line(error)})"
        raise _unknown_weights(what) from error
    return Path(found)


def _unknown_weights(what: str) -> ConfigurationError:
    """Return the error for weights without a fingerprint, which need a name.

    :param what: the weights' files, as the error calls them.
    """
    expected = (
        f"a name for the weights, changed whenever they change: {what} cannot be "
        f"fingerprinted"
    )
    return MissingOptionError("secondary tier persistkv option weights", expected)


def _adapters(
    lora: Any,
    name: str | None,
) -> dict[str, Any] | None:
    """Return what identifies the LoRA adapters, which may be loaded at any time; None: there are
    none."""
    if lora is None:
        return None
    if name is None:
        expected = "a name for the set of LoRA adapters, changed with each of them"
        raise MissingOptionError("secondary tier persistkv option adapters", expected)
    return {
        "name": name,
        "dtype": dtype_name(lora.lora_dtype),
        "target_modules": plain(getattr(lora, "target_modules", None)),
    }


def _speculation(
    speculative: Any,
    load: Any,
) -> dict[str, Any] | None:
    """Return the identity of a draft model, whose layers may keep their KV in the same blocks;
    None: there is no speculative decoding."""
    if speculative is None:
        return None
    identity = {
        "method": plain(getattr(speculative, "method", None)),
        "weights": None,
        "config": None,
    }
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        # always use a fingerprint, because the option ``weights`` names those of the main model
        identity["weights"] = _weights(draft, load, None)
        identity["config"] = plain_config(draft.hf_config.to_dict())
    return identity


def _fields(
    source: Any,
    *names: str,
) -> dict[str, Any]:
    """Return these attributes as JSON values; None for those that a release of vLLM lacks."""
    return {name: plain(getattr(source, name, None)) for name in names}
