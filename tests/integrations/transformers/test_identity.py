from __future__ import annotations

import json

import pytest
import torch

from persistkv.errors import UnsupportedModelError
from persistkv.integrations.transformers.identity import model_identity
from persistkv.integrations.transformers.probe import probe_model
from persistkv.storage.identity import Identity


def identity(model, checkpoint=None, block_size=16):
    return Identity.of(model_identity(model, checkpoint, probe_model(model), block_size))


def different_fields(ours, theirs):
    return [difference.field for difference in identity(ours).diff(identity(theirs))]


def test_equal_models_have_one_identity(make_model):
    assert identity(make_model()).digest == identity(make_model()).digest


def test_is_json_and_says_what_matters(model):
    fields = json.loads(json.dumps(model_identity(model, None, probe_model(model), 16), allow_nan=False))
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


def test_one_edited_row_is_another_identity(make_model):
    edited = make_model()
    with torch.no_grad():
        edited.model.embed_tokens.weight[17] += 1e-3
    assert different_fields(make_model(), edited) == ["weights"]


def test_names_the_field_that_differs(make_model):
    assert different_fields(make_model(), make_model(seed=1)) == ["weights"]
    rope = {"rope_type": "default", "rope_theta": 500.0}
    assert "config.rope_parameters.rope_theta" in different_fields(make_model(), make_model(rope_parameters=rope))
    assert "dtype.kv" in different_fields(make_model(), make_model().to(torch.bfloat16))
    assert different_fields(make_model(), make_model(attn_implementation="eager")) == ["attention"]


def test_block_size_matters_and_the_path_does_not(make_model):
    model = make_model()
    assert identity(model, block_size=8).digest != identity(model).digest
    model.config.name_or_path = "/somewhere/else"
    model.config.use_cache = False
    assert identity(model).digest == identity(make_model()).digest


def test_quantisation_is_kept_whole_and_parts_are_not_forgotten(make_model):
    model = make_model()
    model.config.quantization_config = {"quant_method": "x", "dtype": "int8", "use_cache": 1}
    model.config.text_config = {"dtype": "float32", "hidden_size": 9}
    config = model_identity(model, None, probe_model(make_model()), 16)["config"]
    assert config["quantization_config"] == {"quant_method": "x", "dtype": "int8", "use_cache": 1}
    assert config["text_config"] == {"hidden_size": 9}


def test_checkpoints_and_objects_do_not_meet(make_model, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = make_model()
    model.save_pretrained(tmp_path / "model")
    on_disk = identity(model, tmp_path / "model")
    assert on_disk.fields["weights"].startswith("checkpoint:")
    assert [difference.field for difference in on_disk.diff(identity(model))] == ["weights"]


def test_weights_without_bytes_have_no_identity(make_model):
    model = make_model()
    geometry = probe_model(model)
    with pytest.raises(UnsupportedModelError, match="embed_tokens"):
        model_identity(model.to("meta"), None, geometry, 16)
