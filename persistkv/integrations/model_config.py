"""A Hugging Face model's configuration as part of an identity: JSON values, without what leaves KV bytes alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_IRRELEVANT = frozenset(
    {
        # where the model came from and what wrote it
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
        # what a forward pass returns, not what it computes
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        # names of a classifier's outputs
        *("id2label", "label2id", "problem_type"),
        # its own field: it is asked of the model, which may have been cast
        *("dtype", "torch_dtype"),
    }
)
_PART = "_config"
_QUANTIZATION = "quantization_config"  # of its own kind: a dtype in it is no repetition


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration and those of its parts, as JSON values, without what is proven to leave KV bytes alone."""
    return {
        name: plain_config(item) if name.endswith(_PART) and name != _QUANTIZATION and item else plain(item)
        for name, item in config.items()
        if name not in _IRRELEVANT
    }


def plain(value: Any) -> Any:
    """A value as JSON has it; what JSON does not know becomes text."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=json.dumps)
    if isinstance(value, float) and value - value != 0:
        return str(value)  # JSON knows neither infinity nor NaN
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
