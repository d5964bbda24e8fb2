from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypedDict

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from persistkv import Engine

OpenEngine = Callable[..., Engine]


class EngineOptions(TypedDict, total=False):
    """Options of ``Engine.open``."""

    block_size: int
    device_blocks: int | None
    cpu_bytes: int | str
    codec: str
    host: str
    strict_identity: bool
    required: bool
    lookup_deadline_s: float
    prewarm_share: float
    load_policy: str
    prefill_tokens_per_s: float | None
    tenant: str
    dtype: torch.dtype | str
    attn_implementation: str | None
    tokenizer: PreTrainedTokenizerBase | None


def tiny_llama(seed: int = 0, **changes: object) -> LlamaForCausalLM:
    fields: dict[str, object] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": None,
        "eos_token_id": None,
        "initializer_range": 0.2,
    }
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**(fields | changes))).eval()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Limit torch to one thread: more threads do not speed up such small models, and slow them down
    on busy cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def load_always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load whatever a store holds: such small models compute about as fast as a store loads."""
    defaults = Engine.open.__func__.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "load_policy", "always")


@pytest.fixture(scope="session")
def make_model() -> Callable[..., LlamaForCausalLM]:
    return tiny_llama


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def prompt() -> list[int]:
    return [(7 * index * index + 3 * index) % 256 for index in range(100)]


SMALL: dict[str, object] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "sliding_window": 32,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
MIXED = [
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
]


def tiny_gemma3() -> Gemma3ForCausalLM:
    torch.manual_seed(3)
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SMALL, num_hidden_layers=4, layer_types=MIXED)
    ).eval()


def tiny_mistral() -> MistralForCausalLM:
    torch.manual_seed(4)
    return MistralForCausalLM(MistralConfig(**SMALL, num_hidden_layers=2)).eval()


def tiny_gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(5)
    config = GptOssConfig(
        **SMALL | {"sliding_window": 13},
        num_hidden_layers=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention", "sliding_attention"],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    return GptOssForCausalLM(config).eval()


def tiny_cohere2() -> Cohere2ForCausalLM:
    torch.manual_seed(6)
    # derived by this model
    sizes = {name: value for name, value in SMALL.items() if name != "head_dim"}
    return Cohere2ForCausalLM(Cohere2Config(**sizes, num_hidden_layers=4)).eval()


@pytest.fixture(scope="session")
def gemma() -> Gemma3ForCausalLM:
    """Model whose layers 0, 1 and 3 attend to 32 tokens, and layer 2 to all."""
    return tiny_gemma3()


@pytest.fixture(scope="session", params=[tiny_gemma3, tiny_mistral, tiny_gpt_oss])
def windowed(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Model with mixed layers, with sliding layers only, or with a window that is not a multiple of
    a block."""
    made: PreTrainedModel = request.param()
    return made
