"""A Hugging Face model's configuration as part of an identity: JSON values, without fields that do
not affect KV."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

_IRRELEVANT = frozenset(
    {
        # source of the model and the release that saved it
        *("_name_or_path", "name_or_path", "_commit_hash", "transformers_version"),
        # results that a forward pass returns, which do not affect the KV
        *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
        # names of a classifier's outputs
        *("id2label", "label2id", "problem_type"),
        # the dtype is a field of its own, read from the model, which may have been cast
        *("dtype", "torch_dtype"),
    }
)
_JSON_TYPES = (bool, int, float, str, type(None))
_NESTED = "_config"
"""End of the names of fields that are configurations themselves, such as ``text_config``."""
_QUANTIZATION = "quantization_config"
"""A field with this end that is no part of the model: it is kept whole, with its own dtypes."""


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a configuration and its nested ones to JSON values, without the fields that do not
    affect KV bytes (``_IRRELEVANT``)."""
    fields = {}
    for name, item in config.items():
        if name in _IRRELEVANT:
            continue
        is_nested = name.endswith(_NESTED) and name != _QUANTIZATION
        # a nested configuration is None or empty if the model lacks this part
        if is_nested and item:
            fields[name] = plain_config(item)
        else:
            fields[name] = plain(item)
    return fields


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of torch, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def plain(value: Any) -> Any:
    """Convert a value to JSON values; values without a JSON type become text."""
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        items = map(plain, value)
        # a set has no order: sort, so that equal sets have equal identities
        return sorted(items, key=json.dumps)
    # JSON has neither infinity nor NaN
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, _JSON_TYPES):
        return value
    return str(value)
