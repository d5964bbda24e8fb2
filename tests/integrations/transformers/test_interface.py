"""Names under which releases of transformers take the KV cache, and releases that persistkv does
not know."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import torch
import transformers
from transformers import Cache, DynamicCache, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from persistkv import Engine, UnsupportedModelError, UnsupportedReleaseError
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.model import probe_model
from tests.integrations.transformers.conftest import EngineOptions, tiny_llama

RELEASE = f"transformers {transformers.__version__}"
INSTALLED_NAME = ModelForward(LlamaForCausalLM).cache_argument


class OlderName(LlamaForCausalLM):  # type: ignore[misc]
    """Model of a checkpoint with code of its own, which was written for releases before 5.24."""

    def forward(
        self,
        input_ids: torch.Tensor,
        past_key_values: Cache | None = None,
        **options: object,
    ) -> CausalLMOutputWithPast:
        return super().forward(
            input_ids, **{INSTALLED_NAME: past_key_values}, **options
        )


class NewerName(LlamaForCausalLM):  # type: ignore[misc]
    """Model of a checkpoint with code of its own, which was written for releases from 5.24."""

    def forward(
        self,
        input_ids: torch.Tensor,
        cache: Cache | None = None,
        **options: object,
    ) -> CausalLMOutputWithPast:
        return super().forward(input_ids, **{INSTALLED_NAME: cache}, **options)


class OtherName(LlamaForCausalLM):  # type: ignore[misc]
    """Model that passes its state under a name of its own."""

    def forward(
        self,
        input_ids: torch.Tensor,
        state: Cache | None = None,
    ) -> CausalLMOutputWithPast:
        return super().forward(input_ids, **{INSTALLED_NAME: state})


def unknown_forward(
    self: LlamaForCausalLM,
    input_ids: torch.Tensor,
    kv_state: Cache | None = None,
) -> NoReturn:
    raise AssertionError("must not be called")


@pytest.mark.parametrize(
    ("kind", "name"), [(OlderName, "past_key_values"), (NewerName, "cache")]
)
def test_engine_model_with_either_cache_name_answers_like_plain_model(
    kind: type[LlamaForCausalLM],
    name: str,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    plain = tiny_llama()
    made = kind(plain.config).eval()
    made.load_state_dict(plain.state_dict())
    assert ModelForward(made).cache_argument == name
    options: EngineOptions = {
        "device_blocks": 32,
        "cpu_bytes": "8MiB",
        "host": "thread",
    }
    with Engine.open(plain, tmp_path / "plain", **options) as engine:
        expected = engine.generate(prompt, 8).tokens
    with Engine.open(made, tmp_path / "made", **options) as engine:
        assert engine.generate(prompt, 8).tokens == expected


def test_model_forward_returns_logits_of_last_token_and_fills_cache(
    model: LlamaForCausalLM,
    prompt: list[int],
) -> None:
    cache, tokens = DynamicCache(config=model.config), torch.tensor([prompt])
    with torch.no_grad():
        logits = ModelForward(model)(tokens, cache)
        torch.testing.assert_close(logits, model(input_ids=tokens).logits[0, -1])
    assert cache.get_seq_length() == len(prompt)


def test_probe_model_without_cache_name_raises_naming_model(
    model: LlamaForCausalLM,
) -> None:
    with pytest.raises(UnsupportedModelError, match="OtherName takes no KV cache"):
        probe_model(OtherName(model.config).eval())


def test_probe_model_release_with_unknown_cache_name_raises_naming_release(
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "forward", unknown_forward)
    with pytest.raises(UnsupportedReleaseError, match=RELEASE) as caught:
        probe_model(model)
    assert "Llama" not in str(caught.value)


def test_probe_model_release_that_runs_no_model_raises_naming_release(
    model: LlamaForCausalLM,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> NoReturn:
        raise TypeError("forward() needs positions")

    monkeypatch.setattr(LlamaModel, "forward", fail)
    with pytest.raises(UnsupportedReleaseError, match=f"{RELEASE}: .*needs positions"):
        probe_model(model)
