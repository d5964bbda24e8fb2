"""Loading of models, and the location of their weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import cached_file

from persistkv.errors import ConfigurationError


def load_model(
    source: str | Path,
    dtype: torch.dtype | str = "auto",
    attn_implementation: str | None = None,
    device: torch.device | str | None = None,
) -> tuple[Any, Path | None]:
    """Load a model for inference.

    :param source: a directory with a checkpoint, or a name that transformers knows.
    :returns: the model and the directory of its weights. The directory is None if adapters were loaded on top of them:
        such weights can be identified by their state dict only.
    :raises ConfigurationError: if no model can be loaded from there.
    """
    extra = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **extra)
        directory = Path(source) if Path(source).is_dir() else Path(cached_file(str(source), "config.json")).parent
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ConfigurationError("model", str(source), f"a decoder-only checkpoint ({reason})") from error
    if device is not None:
        model = model.to(device)
    adapted = getattr(model, "_hf_peft_config_loaded", False)
    return model, None if adapted else directory
