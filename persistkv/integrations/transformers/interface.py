"""Interface of the installed release of transformers: the only module that knows how releases
differ.

A release that lacks what persistkv uses raises ``UnsupportedReleaseError``, so that no model is
blamed for it.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

from persistkv.errors import UnsupportedModelError, UnsupportedReleaseError

try:
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.cache_utils import (
        Cache,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
    from transformers.utils import cached_file
    from transformers.utils.peft_utils import find_adapter_config_file
except ImportError as error:
    raise UnsupportedReleaseError(
        "transformers", transformers.__version__, str(error)
    ) from error

__all__ = [
    "Cache",
    "DynamicCache",
    "DynamicLayer",
    "DynamicSlidingWindowLayer",
    "ModelForward",
    "cached_file",
    "find_adapter_config_file",
    "reference_model",
]

_CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names under which releases take the KV cache, newest first: ``cache`` since 5.24, with the other
one deprecated."""


class ModelForward:
    """Forward pass of a model for new tokens of one sequence.

    :ivar cache_argument: name under which the model, and its ``generate``, take the KV cache.
    :raises UnsupportedModelError: the model takes no KV cache.
    :raises UnsupportedReleaseError: this release passes caches under a name that persistkv does not
        know.
    """

    def __init__(self, model: Any) -> None:
        name = _cache_argument(model)
        if name is None:
            # if even a plain Llama takes no cache under a known name, the release is the reason
            if _cache_argument(LlamaForCausalLM) is None:
                problem = f"models take no {' or '.join(_CACHE_ARGUMENTS)}"
                raise UnsupportedReleaseError(
                    "transformers", transformers.__version__, problem
                )
            raise UnsupportedModelError(f"{type(model).__name__} takes no KV cache")
        self.cache_argument = name
        self._model = model
        self._options: dict[str, Any] = {"use_cache": True}
        """Further arguments of each forward pass."""
        # Compute the logits of the last position only, if the model can do that.
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            self._options["logits_to_keep"] = 1

    def __call__(
        self,
        tokens: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Run the model on tokens of shape (1, tokens) and append their KV to a cache of
        transformers.

        :returns: the logits after the last token, shape (vocabulary,).
        """
        output = self._model(
            input_ids=tokens, **{self.cache_argument: cache}, **self._options
        )
        logits: torch.Tensor = output.logits[0, -1]
        return logits


def _cache_argument(model: Any) -> str | None:
    """Return the name under which a model, or its class, takes the KV cache; None: it takes
    none."""
    parameters = inspect.signature(model.forward).parameters
    for name in _CACHE_ARGUMENTS:
        if name in parameters:
            return name
    return None


def reference_model() -> Any:
    """Return a tiny Llama, which every supported release runs. torch's random state is
    unchanged."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        return LlamaForCausalLM(config).eval()
