"""Models: loading, the check that the engine supports them, and the identity of their KV bytes.

The engine supports models whose whole state is the KV of full or sliding-window attention. The
configuration is checked first. Then one token is run with transformers' own cache, whose layers
show the KV.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from huggingface_hub import repo_exists, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from persistkv.errors import (
    ConfigurationError,
    UnsupportedModelError,
    UnsupportedReleaseError,
    first_line,
)
from persistkv.integrations.model_config import dtype_name, plain_config
from persistkv.integrations.transformers.interface import (
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    ModelForward,
    cached_file,
    find_adapter_config_file,
    reference_model,
)
from persistkv.integrations.transformers.kv_cache import KVGeometry, KVGroupGeometry
from persistkv.integrations.transformers.request import HASH_NAME
from persistkv.storage.format.codec import Buffer
from persistkv.storage.identity import (
    MODEL_NAME,
    fingerprint_checkpoint,
    fingerprint_tensors,
)

IDENTITY_VERSION = 1
"""Version of the fields of the identity; KV that was stored under another one is not found."""
KV_LAYOUT = "per group: block, layer, key or value, head, token, head size"
"""Order of the dimensions of a stored block, outermost first; part of the identity."""

_SHOWN_KEYS = 3  # maximum number of names of missing weights in an error
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
"""Types of rotary embedding whose frequencies depend on the length of the whole sequence."""


def load_model(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Path | None]:
    """Load a model for inference.

    :param source: a directory with a checkpoint, or the name of a model that transformers finds.
    :param device: device to move the model to; None: it stays where transformers loads it.
    :returns: the model and the directory of its weights. The directory is None if adapters were
        loaded on top of them; the model can then only be identified by its state dict.
    :raises ConfigurationError: if no model can be loaded from ``source``.
    :raises UnsupportedModelError: if it is an encoder-decoder, or the checkpoint lacks weights.
    """
    check_source("model", source)
    extra = {}
    if attn_implementation is not None:
        extra["attn_implementation"] = attn_implementation
    try:
        saved_config = _saved_config(source)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            source, dtype=dtype, output_loading_info=True, **extra
        )
        directory = _checkpoint_directory(source)
    except (OSError, ValueError, KeyError) as error:
        raise _load_error(error, source, attn_implementation) from error
    missing = sorted(loading_info["missing_keys"])
    # refuse missing weights, to which transformers has given random values
    if missing:
        name = _saved_model_class(saved_config or model.config)
        shown = ", ".join(missing[:_SHOWN_KEYS])
        raise UnsupportedModelError(
            f"{source} holds a {name} without {shown}: not a whole {type(model).__name__}"
        )
    if device is not None:
        model = model.to(device)
    # transformers sets this if it has loaded adapters; the files of the weights do not show it
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    return model, None if adapted else directory


def _saved_config(source: str | Path) -> Any:
    """Return the configuration of a checkpoint; None: it has only adapters, which have none.

    :raises UnsupportedModelError: the configuration is that of an encoder-decoder.
    """
    if find_adapter_config_file(source):
        return None
    config = AutoConfig.from_pretrained(source)
    # refuse an encoder-decoder, of which the causal class would load only the decoder
    if config.is_encoder_decoder:
        raise UnsupportedModelError(_encoder_decoder(_saved_model_class(config)))
    return config


def check_source(name: str, source: str | Path) -> None:
    """Check that there is a directory, or a model of this name on Hugging Face.

    Without this check, transformers would ask for each file six times within 23 s if the model does
    not exist, or the server cannot be reached.

    :param name: name of the argument, for the error.
    :raises ConfigurationError: there is neither, or the server cannot be asked.
    """
    if Path(source).is_dir():
        return
    reason = "there is neither"
    try:
        if _is_cached(str(source)) or repo_exists(str(source)):
            return
    except HFValidationError:
        reason = "there is no such directory"
    except HfHubHTTPError:
        # accept the name, because the server may lack this call, or refuse it, and still have the
        # files; otherwise, their download raises the reason
        return
    # without a network, each library that takes part raises exceptions of its own
    except Exception as error:
        why = first_line(error)
        reason = f"there is no such directory, and Hugging Face cannot be asked ({why})"
    raise ConfigurationError(
        name,
        str(source),
        f"the directory of a checkpoint, or its name on Hugging Face: {reason}",
    )


def _is_cached(name: str) -> bool:
    """Return whether the configuration of a model on Hugging Face was downloaded earlier."""
    for file in ("config.json", "adapter_config.json"):
        if isinstance(try_to_load_from_cache(name, file), str):
            return True
    return False


def _load_error(
    error: Exception,
    source: str | Path,
    attn_implementation: str | None,
) -> ConfigurationError:
    """Return an error of transformers in the words of the options of ``load_model``."""
    reason = first_line(error)
    if attn_implementation is not None and "attn_implementation" in reason:
        expected = f"one for {source} ({reason})"
        return ConfigurationError("attn_implementation", attn_implementation, expected)
    return ConfigurationError(
        "model", str(source), f"a decoder-only checkpoint ({reason})"
    )


def check_model_object(model: object) -> None:
    """Raise ConfigurationError unless this is a model that was loaded already."""
    shown = None if model is None else type(model).__name__
    if not isinstance(model, torch.nn.Module):
        expected = "a checkpoint's directory or name, or a model of transformers"
        raise ConfigurationError("model", shown, expected)
    # refuse the wrapper of torch.compile, which hides the arguments that the model takes
    if hasattr(model, "_orig_mod"):
        expected = "the model that was compiled: model.compile() compiles it in place"
        raise ConfigurationError("model", f"torch.compile's {shown}", expected)


def _checkpoint_directory(source: str | Path) -> Path:
    """Return the directory with a model's files: the source itself, or the place in the local cache
    to which Hugging Face's library has downloaded the model."""
    if Path(source).is_dir():
        return Path(source)
    return Path(cached_file(str(source), "config.json")).parent


def _saved_model_class(config: Any) -> str:
    """Return the name of the model class in a checkpoint's configuration, or else its model
    type."""
    names = config.architectures or [config.model_type]
    return str(names[0])


def _encoder_decoder(name: str) -> str:
    """Return the text of the error for a model of this class."""
    return (
        f"{name} is an encoder-decoder: its cross-attention cache belongs to no token"
    )


def probe_model(model: Any) -> KVGeometry:
    """Check that the engine supports a model; return its KV cache groups, in the order of their
    first layers.

    :param model: a Hugging Face decoder-only model on its device.
    :raises UnsupportedModelError: if the engine does not support the model; names the unsupported
        part.
    :raises UnsupportedReleaseError: if the installed release of transformers runs not even a plain
        Llama as expected.
    """
    try:
        return _probe(model)
    except UnsupportedModelError:
        # raise another error instead if this release fails with every model
        _check_release()
        raise


def _probe(model: Any) -> KVGeometry:
    """Do the same as ``probe_model``, but without a check of the release."""
    # take the part of a multimodal model that has the KV cache
    config = model.config.get_text_config(decoder=True)
    _check_config(model, config)
    return _grouped(type(model).__name__, _layers_after_one_token(model, config))


def _check_release() -> None:
    """Probe a model that every supported release of transformers runs.

    :raises UnsupportedReleaseError: the installed release does not.
    """
    try:
        _probe(reference_model())
    except UnsupportedReleaseError:
        raise
    except Exception as error:  # an unknown release may fail in any way
        raise UnsupportedReleaseError(
            "transformers", transformers.__version__, str(error)
        ) from error


def _check_config(model: Any, config: Any) -> None:
    """Raise UnsupportedModelError if the configuration names a part that the engine does not
    support."""
    name = type(model).__name__
    # ``config`` is the decoder's part of ``model.config``; either may have the field
    for part in (config, model.config):
        if getattr(part, "is_encoder_decoder", False):
            raise UnsupportedModelError(_encoder_decoder(name))
    ModelForward(model)  # this refuses models without a KV cache
    can_generate = getattr(model, "can_generate", None)
    # The causal class also loads models of other kinds without an error: a Llama without a head
    # gets random weights for it, and BERT runs like a decoder.
    if can_generate is None or not can_generate():
        raise UnsupportedModelError(
            f"{name} is not a causal language model: it has no head that predicts tokens"
        )
    _check_kv(name, config)
    _check_attention(name, model, config)


def _check_kv(name: str, config: Any) -> None:
    """Raise UnsupportedModelError unless each layer has keys and values of its own, of one size."""
    if getattr(config, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"{name} has multi-head latent attention (MLA): its keys and values differ in size"
        )
    if getattr(config, "num_kv_shared_layers", 0):
        raise UnsupportedModelError(
            f"{name} shares KV between layers ({config.num_kv_shared_layers} of them)"
        )


def _check_attention(
    name: str,
    model: Any,
    config: Any,
) -> None:
    """Raise UnsupportedModelError unless the KV of a token depends on it and earlier tokens
    only."""
    if _attends_to_later_tokens(model, config):
        raise UnsupportedModelError(
            f"{name} attends to later tokens: its KV is not that of a prefix"
        )
    for rope_type in sorted(_rope_types(config)):
        if rope_type in _LENGTH_DEPENDENT_ROPE:
            raise UnsupportedModelError(
                f"{name}: {rope_type!r} rotary embedding makes KV depend on later tokens: no "
                f"prefix can be shared"
            )
    layer_types = getattr(config, "layer_types", None) or ()
    chunk_size = getattr(config, "attention_chunk_size", None)
    if "chunked_attention" in layer_types or chunk_size:
        raise UnsupportedModelError(
            f"{name} has chunked attention; only full and sliding-window attention is supported"
        )


def _attends_to_later_tokens(model: Any, config: Any) -> bool:
    """Return whether a token attends to tokens after it: then the KV of a prefix depends on what
    follows, and cannot be reused."""
    if not getattr(config, "is_causal", True):
        return True
    if getattr(config, "use_bidirectional_attention", None) in (True, "all"):
        return True
    # A configuration may lack both fields, so check the attention modules of the layers, too;
    # None is a module that does not say. A model with any causal attention counts as causal.
    causal = set()
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            causal.add(getattr(module, "is_causal", None))
    return False in causal and True not in causal


def _rope_types(config: Any) -> set[str]:
    """Return the types of rotary embedding in a configuration, also those for one layer type."""
    found: set[str] = set()
    for parameters in _rope_parameters(config):
        for field in ("rope_type", "type"):  # the present name, and the older one
            if field in parameters:
                found.add(str(parameters[field]))
    return found


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """Return the RoPE parameters of a configuration, in the form of transformers 4 or 5, nested
    ones of one layer type included.
    """
    found: list[dict[str, Any]] = []
    # values that may be parameters, or contain the parameters of each layer type
    candidates = [
        getattr(config, "rope_parameters", None),
        getattr(config, "rope_scaling", None),
    ]
    while candidates:
        candidate = candidates.pop()
        if isinstance(candidate, dict):
            found.append(candidate)
            candidates += candidate.values()
    return found


def vocabulary_size(model: Any) -> int:
    """Return the number of token ids of a model."""
    size: int = model.get_input_embeddings().num_embeddings
    return size


def context_length(model: Any) -> int | None:
    """Return how many tokens a sequence of the model may have; None if its configuration names no
    limit.

    With scaled rotary embeddings the limit is at least the factor times the original length: some
    configurations give the unscaled length as ``max_position_embeddings``
    (https://huggingface.co/docs/transformers, RoPE parameters).
    """
    config = model.config.get_text_config(decoder=True)
    configured = getattr(config, "max_position_embeddings", None)
    if not isinstance(configured, int) or configured <= 0:
        return None
    limit = configured
    for parameters in _rope_parameters(config):
        original = parameters.get("original_max_position_embeddings") or configured
        factor = parameters.get("factor") or 1
        limit = max(limit, int(original * factor))
    return limit


def _layers_after_one_token(model: Any, config: Any) -> list[DynamicLayer]:
    """Run the model on one token with transformers' own cache; return the cache's layers."""
    name = type(model).__name__
    cache = DynamicCache(config=config)
    for layer_idx, layer in enumerate(cache.layers):
        # compare the classes exactly, because a subclass may keep more than keys and values
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise UnsupportedModelError(
                f"{name}: layer {layer_idx} keeps a {type(layer).__name__}; "
                "only full and sliding-window attention is supported"
            )
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            ModelForward(model)(token, cache)
    except (
        AttributeError,
        IndexError,
        NotImplementedError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        raise UnsupportedModelError(
            f"{name} does not run on a plain KV cache: {error}"
        ) from error
    return list(cache.layers)


class _Kind(NamedTuple):
    """Properties that all layers of a KV cache group have in common; see ``KVGroupGeometry``."""

    num_heads: int
    head_dim: int
    sliding_window: int | None
    """Tokens of the sliding window; None: full attention."""
    dtype: torch.dtype
    device: torch.device


def _grouped(name: str, layers: list[DynamicLayer]) -> KVGeometry:
    """Return the KV cache groups of layers that have run one token.

    :param name: of the model's class, for errors.
    """
    # by kind, the indices of its layers; the kinds are in the order of their first layers
    layers_of: dict[_Kind, list[int]] = {}
    for layer_idx, layer in enumerate(layers):
        kind = _kind_of(f"{name}: layer {layer_idx}", layer)
        layers_of.setdefault(kind, []).append(layer_idx)
    groups = []
    for kind, members in layers_of.items():
        group = KVGroupGeometry(
            layers=tuple(members),
            num_heads=kind.num_heads,
            head_dim=kind.head_dim,
            sliding_window=kind.sliding_window,
            dtype=kind.dtype,
            device=kind.device,
        )
        groups.append(group)
    places = sorted({f"{group.dtype} on {group.device}" for group in groups})
    if len(places) != 1:
        raise UnsupportedModelError(
            f"{name}: layers differ in the type or device of their KV: {', '.join(places)}"
        )
    return tuple(groups)


def _kind_of(where: str, layer: DynamicLayer) -> _Kind:
    """Return the properties of a layer that has run one token.

    :param where: model and layer, for errors.
    :raises UnsupportedModelError: its KV is not one key and one value for each head.
    """
    num_tokens = layer.get_seq_length()
    if num_tokens != 1:
        raise UnsupportedModelError(
            f"{where} wrote its KV {num_tokens} times for one token, not once"
        )
    keys = layer.keys
    values = layer.values
    are_alike = keys.shape == values.shape and keys.dtype == values.dtype
    # shape (sequences, heads, tokens, head size), here with one sequence and one token
    has_shape = keys.ndim == 4 and keys.shape[0] == keys.shape[2] == 1
    if not (are_alike and has_shape):
        raise UnsupportedModelError(
            f"{where} has keys of {tuple(keys.shape)} and values of {tuple(values.shape)}; "
            "(1, heads, 1, head size) is needed for both"
        )
    window = getattr(layer, "sliding_window", None)
    if window is not None:
        window = int(window)
    _, num_heads, _, head_dim = keys.shape
    return _Kind(
        num_heads=num_heads,
        head_dim=head_dim,
        sliding_window=window,
        dtype=keys.dtype,
        device=keys.device,
    )


def model_identity(
    model: Any,
    checkpoint: Path | None,
    geometry: KVGeometry,
    block_size: int,
) -> dict[str, Any]:
    """Return everything that must match for this model's KV bytes to be valid, as JSON values.

    :param checkpoint: the directory that the model was loaded from, whose files identify the
        weights; None: the state dict identifies them.
    :raises ConfigurationError: if the checkpoint cannot be read.
    :raises UnsupportedModelError: if a weight's bytes are not available.
    """
    if checkpoint:
        weights = fingerprint_checkpoint(checkpoint)
    else:
        weights = fingerprint_tensors(_state(model))
    name = checkpoint or model.config.name_or_path or type(model).__name__
    return {
        "version": IDENTITY_VERSION,
        MODEL_NAME: str(name),
        "weights": weights,
        "config": plain_config(model.config.to_dict()),
        "architecture": type(model).__name__,
        "attention": str(getattr(model.config, "_attn_implementation", None)),
        "dtype": {
            "model": dtype_name(model.dtype),
            "kv": dtype_name(geometry[0].dtype),
        },
        "kv_layout": KV_LAYOUT,
        "groups": [_group_identity(group) for group in geometry],
        "block_size": block_size,
        "world": {"tensor_parallel": 1, "pipeline_parallel": 1},
        "hash": HASH_NAME,
    }


def _group_identity(group: KVGroupGeometry) -> dict[str, Any]:
    """Return what the identity says of one KV cache group."""
    kind = "full_attention" if group.sliding_window is None else "sliding_attention"
    return {
        "kind": kind,
        "sliding_window": group.sliding_window,
        "layers": list(group.layers),
        "heads": group.num_heads,
        "head_size": group.head_dim,
    }


def _state(model: Any) -> Iterator[tuple[str, str, tuple[int, ...], Buffer]]:
    """Yield name, dtype, shape and bytes of each tensor of the model's weights.

    :raises UnsupportedModelError: the bytes of a tensor are not in memory.
    """
    for name, tensor in model.state_dict().items():
        is_strided = isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided
        if not is_strided or tensor.is_meta:
            raise UnsupportedModelError(
                f"the bytes of {name!r} cannot be had, so the weights cannot be identified"
            )
        on_cpu = tensor.detach().cpu()
        flat = on_cpu.contiguous().reshape(-1)
        # view the numbers as bytes, because NumPy has no bfloat16
        data = flat.view(torch.uint8).numpy().data
        yield name, dtype_name(tensor.dtype), tuple(tensor.shape), data
