from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BartModel,
    BertConfig,
    BertLMHeadModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from persistkv.errors import ConfigurationError, UnsupportedModelError
from persistkv.integrations.transformers.kv_cache import KVGroupGeometry
from persistkv.integrations.transformers.model import (
    load_model,
    model_identity,
    probe_model,
)
from persistkv.storage.identity import Identity

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "pad_token_id": None,
}


def tiny_bart() -> BartConfig:
    sizes = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in BART_SIDE.items()
    }
    return BartConfig(vocab_size=64, d_model=32, max_position_embeddings=64, **sizes)


BART_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 48}
LAYERS = [
    "sliding_attention",
    "sliding_attention",
    "full_attention",
    "sliding_attention",
]


def test_probe_model_grouped_query_attention_returns_geometry(
    model: PreTrainedModel,
) -> None:
    assert probe_model(model) == (
        KVGroupGeometry((0, 1), 2, 16, None, torch.float32, torch.device("cpu")),
    )


def test_probe_model_bfloat16_returns_dtype(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    (group,) = probe_model(make_model().to(torch.bfloat16))
    assert group.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("config", "kind", "heads"),
    [
        (GPTNeoXConfig(**SMALL), GPTNeoXForCausalLM, 4),
        (Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=8), Qwen3ForCausalLM, 2),
        (
            MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=None),
            MistralForCausalLM,
            2,
        ),
    ],
)
def test_probe_model_full_attention_returns_one_group_without_window(
    config: PretrainedConfig,
    kind: type[PreTrainedModel],
    heads: int,
) -> None:
    (group,) = probe_model(kind(config).eval())
    assert (group.num_heads, group.sliding_window) == (heads, None)


@pytest.mark.parametrize(
    ("config", "kind", "groups"),
    [
        (
            MistralConfig(**SMALL, num_key_value_heads=2, sliding_window=8),
            MistralForCausalLM,
            [((0, 1), 8)],
        ),
        (
            Gemma3TextConfig(
                **SMALL | {"num_hidden_layers": 4},
                head_dim=8,
                sliding_window=16,
                layer_types=LAYERS,
            ),
            Gemma3ForCausalLM,
            [((0, 1, 3), 16), ((2,), None)],
        ),
        (
            Qwen2Config(
                **SMALL,
                num_key_value_heads=2,
                use_sliding_window=True,
                sliding_window=4,
                max_window_layers=1,
            ),
            Qwen2ForCausalLM,
            [((0,), None), ((1,), 4)],
        ),
    ],
)
def test_probe_model_sliding_window_layers_are_grouped_by_window(
    config: PretrainedConfig,
    kind: type[PreTrainedModel],
    groups: list[tuple[tuple[int, ...], int | None]],
) -> None:
    assert [
        (group.layers, group.sliding_window)
        for group in probe_model(kind(config).eval())
    ] == groups


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            lambda: Gemma3ForCausalLM(
                Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)
            ),
            "later",
        ),
        (
            lambda: Llama4ForCausalLM(
                Llama4TextConfig(
                    **SMALL,
                    intermediate_size_mlp=48,
                    head_dim=8,
                    num_key_value_heads=2,
                    num_local_experts=2,
                )
            ),
            "chunked",
        ),
        (
            lambda: Qwen3NextForCausalLM(
                Qwen3NextConfig(
                    **SMALL, layer_types=["linear_attention", "full_attention"]
                )
            ),
            "LinearAttention",
        ),
        (
            lambda: MambaForCausalLM(
                MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2)
            ),
            "MambaForCausalLM takes no KV cache|MambaForCausalLM: layer 0 keeps a "
            "LinearAttentionLayer",
        ),
        (
            lambda: T5ForConditionalGeneration(
                T5Config(
                    vocab_size=64,
                    d_model=32,
                    d_kv=8,
                    d_ff=48,
                    num_layers=1,
                    num_heads=4,
                )
            ),
            "encoder-decoder",
        ),
        (
            lambda: DeepseekV3ForCausalLM(
                DeepseekV3Config(
                    **SMALL,
                    kv_lora_rank=8,
                    q_lora_rank=8,
                    qk_rope_head_dim=4,
                    qk_nope_head_dim=8,
                    v_head_dim=8,
                    first_k_dense_replace=2,
                )
            ),
            r"DeepseekV3ForCausalLM has multi-head latent attention \(MLA\)",
        ),
        (
            lambda: LlamaModel(LlamaConfig(**SMALL)),
            "LlamaModel is not a causal language model",
        ),
        (
            lambda: LlamaForSequenceClassification(LlamaConfig(**SMALL)),
            "LlamaForSequenceClassification is not a causal",
        ),
        (
            lambda: BartForConditionalGeneration(tiny_bart()),
            "BartForConditionalGeneration is an encoder-decoder",
        ),
        (
            lambda: BertLMHeadModel(BertConfig(**SMALL)),
            "BertLMHeadModel attends to later tokens",
        ),
    ],
)
def test_probe_model_unsupported_architecture_raises_naming_reason(
    make: Callable[[], PreTrainedModel],
    part: str,
) -> None:
    with pytest.raises(UnsupportedModelError, match=part):
        probe_model(make().eval())


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            lambda: BartForConditionalGeneration(tiny_bart()),
            "BartForConditionalGeneration is an encoder-decoder",
        ),
        (lambda: BartModel(tiny_bart()), "BartModel is an encoder-decoder"),
        (
            lambda: LlamaModel(LlamaConfig(**SMALL)),
            r"a LlamaModel without lm_head.weight: not a whole LlamaForCausalLM",
        ),
    ],
)
def test_load_model_non_causal_checkpoint_raises_naming_class(
    make: Callable[[], PreTrainedModel],
    part: str,
    tmp_path: Path,
) -> None:
    make().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match=part):
        load_model(tmp_path)


def test_load_model_missing_checkpoint_raises_naming_path(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent'.*no such directory$"):
        load_model(tmp_path / "absent")


class Hub(BaseHTTPRequestHandler):
    """A server of models that has none, and hangs up when it is asked for ``broken``."""

    paths: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.paths.append(self.path)
        if "broken" in self.path:
            return
        self.send_response(404)
        self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def test_load_model_that_does_not_exist_raises_after_one_request() -> None:
    program = """
from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.model import load_model
for name in ("nope", "broken"):
    try:
        load_model(name)
    except ConfigurationError as error:
        print(error)
"""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment,
    )
    server.shutdown()
    server.server_close()
    unknown, broken = done.stdout.splitlines()
    assert unknown.startswith("model: 'nope' is not valid; ")
    assert unknown.endswith("or its name on Hugging Face: there is neither")
    assert "Hugging Face cannot be asked" in broken
    asked = [path for path in Hub.paths if "models/" in path]
    assert [path.rpartition("/")[2] for path in asked] == ["nope", "broken"]


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_probe_model_length_dependent_rope_raises(
    make_model: Callable[..., LlamaForCausalLM],
    rope_type: str,
) -> None:
    model = make_model()
    model.config.rope_parameters = {
        "rope_type": rope_type,
        "rope_theta": 1e4,
        "factor": 2.0,
    }
    with pytest.raises(UnsupportedModelError, match=rope_type):
        probe_model(model)


def test_probe_model_layers_with_shared_kv_cache_raises(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    model.model.layers[1].self_attn.layer_idx = 0
    with pytest.raises(UnsupportedModelError, match="layer 0 wrote its KV 2 times"):
        probe_model(model)


def test_probe_model_layers_of_different_shapes_are_separate_groups(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = (
        torch.nn.Linear(64, 16),
        torch.nn.Linear(64, 16),
    )
    attention.num_key_value_groups = 4
    assert [(group.layers, group.num_heads) for group in probe_model(model)] == [
        ((0,), 2),
        ((1,), 1),
    ]


def test_probe_model_layers_of_different_dtypes_raises(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    attention = model.model.layers[1].self_attn
    attention.k_proj.register_forward_hook(
        lambda _module, _inputs, output: output.double()
    )
    attention.v_proj.register_forward_hook(
        lambda _module, _inputs, output: output.double()
    )
    attention.q_proj.register_forward_hook(
        lambda _module, _inputs, output: output.double()
    )
    attention.o_proj.double().register_forward_hook(
        lambda _module, _inputs, output: output.float()
    )
    with pytest.raises(UnsupportedModelError, match="layers differ"):
        probe_model(model)


def identity(
    model: PreTrainedModel,
    checkpoint: Path | None = None,
    block_size: int = 16,
) -> Identity:
    return Identity.of(
        model_identity(model, checkpoint, probe_model(model), block_size)
    )


def different_fields(ours: PreTrainedModel, theirs: PreTrainedModel) -> list[str]:
    return [difference.field for difference in identity(ours).diff(identity(theirs))]


def test_model_identity_equal_models_have_equal_digests(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    assert identity(make_model()).digest == identity(make_model()).digest


def test_model_identity_is_json_with_weights_config_dtype_and_groups(
    model: PreTrainedModel,
) -> None:
    fields = json.loads(
        json.dumps(model_identity(model, None, probe_model(model), 16), allow_nan=False)
    )
    assert fields["weights"].startswith("state-dict:")
    assert fields["architecture"] == "LlamaForCausalLM"
    assert fields["config"]["hidden_size"] == 64
    assert fields["dtype"] == {"model": "float32", "kv": "float32"}
    (group,) = fields["groups"]
    assert group == {
        "kind": "full_attention",
        "sliding_window": None,
        "layers": [0, 1],
        "heads": 2,
        "head_size": 16,
    }


def test_model_identity_edited_row_differs_in_weights(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    edited = make_model()
    with torch.no_grad():
        edited.model.embed_tokens.weight[17] += 1e-3
    assert different_fields(make_model(), edited) == ["weights"]


def test_model_identity_changed_model_differs_in_changed_field(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    assert different_fields(make_model(), make_model(seed=1)) == ["weights"]
    rope = {"rope_type": "default", "rope_theta": 500.0}
    assert "config.rope_parameters.rope_theta" in different_fields(
        make_model(), make_model(rope_parameters=rope)
    )
    assert "dtype.kv" in different_fields(make_model(), make_model().to(torch.bfloat16))
    assert different_fields(make_model(), make_model(attn_implementation="eager")) == [
        "attention"
    ]


def test_model_identity_depends_on_block_size_but_not_on_path(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    assert identity(model, block_size=8).digest != identity(model).digest
    model.config.name_or_path = "/somewhere/else"
    model.config.use_cache = False
    assert identity(model).digest == identity(make_model()).digest


def test_model_identity_keeps_full_quantization_and_filters_text_config(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    model.config.quantization_config = {
        "quant_method": "x",
        "dtype": "int8",
        "use_cache": 1,
    }
    model.config.text_config = {"dtype": "float32", "hidden_size": 9}
    config = model_identity(model, None, probe_model(make_model()), 16)["config"]
    assert config["quantization_config"] == {
        "quant_method": "x",
        "dtype": "int8",
        "use_cache": 1,
    }
    assert config["text_config"] == {"hidden_size": 9}


def test_model_identity_checkpoint_and_loaded_model_differ_in_weights(
    make_model: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    on_disk = identity(model, tmp_path / "model")
    assert on_disk.fields["weights"].startswith("checkpoint:")
    assert [difference.field for difference in on_disk.diff(identity(model))] == [
        "weights"
    ]


def test_model_identity_meta_tensors_raises(
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    model = make_model()
    geometry = probe_model(model)
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        model_identity(model.to("meta"), None, geometry, 16)
