from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from persistkv.errors import ConfigurationError
from persistkv.integrations.vllm.identity import (
    SharedLayout,
    engine_identity,
    has_no_kv,
    has_random_hashes,
    shared_layout,
)
from persistkv.storage.identity import Identity
from tests.integrations.vllm.tiny_model import CONFIG, make_model

FACTS = {"name": "vllm", "release": "0.32", "device": "cpu"}


class HfConfig(dict[str, Any]):
    """Configuration with the interface of transformers' configurations."""

    def to_dict(self) -> dict[str, Any]:
        return dict(self)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(make_model(tmp_path / "model")),
            revision=None,
            code_revision=None,
            hf_config=HfConfig(CONFIG),
            dtype="torch.float32",
            quantization=None,
            seed=0,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", prefix_caching_hash_algo="sha256", sliding_window=None
        ),
        load_config=SimpleNamespace(load_format="auto", download_dir=None),
        lora_config=None,
        speculative_config=None,
    )


@pytest.fixture
def offloading() -> SimpleNamespace:
    return SimpleNamespace(
        groups=(
            SimpleNamespace(
                group_id=0, tokens_per_block=16, layer_names=("model.layers.0",)
            ),
        ),
        model=SimpleNamespace(name="tiny", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=SimpleNamespace(
            world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1
        ),
        worker_kv_bytes_per_block=32768,
        replicated_layout=False,
    )


def identity(
    config: SimpleNamespace, offloading: SimpleNamespace, **options: Any
) -> Identity:
    return Identity.of(engine_identity(config, offloading, FACTS, **options))


def set_path(config: SimpleNamespace, path: str, value: float | str) -> None:
    *parents, name = path.split(".")
    target: Any = config
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(target, dict):
        target[name] = value
    else:
        setattr(target, name, value)


def test_engine_identity_other_model_path_has_equal_digest(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    tmp_path: Path,
) -> None:
    ours = identity(config, offloading)
    config.model_config.model = str(make_model(tmp_path / "elsewhere"))
    assert identity(config, offloading).digest == ours.digest


def test_engine_identity_changed_weight_file_differs_in_weights(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    tmp_path: Path,
) -> None:
    ours = identity(config, offloading)
    make_model(tmp_path / "model", seed=1)
    assert [
        difference.field for difference in ours.diff(identity(config, offloading))
    ] == ["weights"]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("model_config.hf_config.rope_theta", 500000.0, "config.rope_theta"),
        ("model_config.dtype", "torch.bfloat16", "dtype.model"),
        ("model_config.quantization", "fp8", "quantization"),
        ("cache_config.cache_dtype", "fp8", "kv_cache.cache_dtype"),
        ("cache_config.prefix_caching_hash_algo", "xxhash", "hash.algorithm"),
        ("cache_config.sliding_window", 64, "attention.sliding_window"),
    ],
)
def test_engine_identity_changed_engine_config_differs_in_its_field(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    path: str,
    value: float | str | int,
    field: str,
) -> None:
    ours = identity(config, offloading)
    set_path(config, path, value)
    assert [
        difference.field for difference in ours.diff(identity(config, offloading))
    ] == [field]


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("cache.blocks_per_chunk", 2, "block.blocks_per_chunk"),
        ("parallel.tp_size", 2, "world.tp_size"),
        ("model.dtype", "fp8", "dtype.kv"),
        ("kv_cache_layout", "HND", "kv_cache.layout"),
    ],
)
def test_engine_identity_changed_offloading_config_differs_in_its_field(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    path: str,
    value: int | str,
    field: str,
) -> None:
    ours = identity(config, offloading)
    set_path(offloading, path, value)
    assert [
        difference.field for difference in ours.diff(identity(config, offloading))
    ] == [field]


def spec_of(
    world: int = 1,
    *,
    layers: int = 2,
    blocks: int = 1,
    cell: int = 32768,
    declared: bool = True,
    **facts: Any,
) -> SimpleNamespace:
    """Return a spec of a model that keeps 64 KiB of KV per block, in all workers together."""
    facts = {
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": "LBHNC",
        **facts,
    }
    copies = 1 if facts["replicated_layout"] else world
    names = tuple(f"model.layers.{index}" for index in range(layers))
    config = SimpleNamespace(
        groups=(SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=names),),
        model=SimpleNamespace(name="tiny", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=blocks),
        parallel=SimpleNamespace(
            world_size=world,
            tp_size=world,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            is_parallelism_agnostic=declared,
        ),
        worker_kv_bytes_per_block=65536 // copies,
        **facts,
    )
    single = facts["replicated_layout"]
    return SimpleNamespace(
        config=config, replicated_layout=single, cpu_page_size_per_worker=cell
    )


SHARED: list[dict[str, Any]] = [
    {"canonical_layout": True},
    {"canonical_layout": True, "replicated_layout": True},
    {"replicated_layout": True},
    {"kv_cache_layout": "BHLNC"},
    {"layers": 1},
]


@pytest.mark.parametrize("facts", SHARED)
def test_engine_identity_shared_layout_is_equal_for_all_world_sizes(
    config: SimpleNamespace, facts: dict[str, Any]
) -> None:
    specs = [spec_of(1, **facts), spec_of(2, **facts)]
    layouts = [shared_layout(spec) for spec in specs]
    kind = "canonical" if facts.get("canonical_layout") else "direct"
    assert layouts == [SharedLayout(kind, 65536)] * 2
    one, two = (
        identity(config, spec.config, shared=shared_layout(spec)) for spec in specs
    )
    assert one.digest == two.digest
    assert one.digest != identity(config, specs[0].config).digest


@pytest.mark.parametrize(
    "facts",
    [
        {"declared": False, "canonical_layout": True},
        {"declared": False, "kv_cache_layout": "BHLNC"},
        # vLLM declares LBHNC independent of the world size, but with two layers the rows of two
        # workers differ
        {},
        {"kv_cache_layout": None},
        {"kv_cache_layout": "BHLNC", "blocks": 2},
        {"kv_cache_layout": "BHLNC", "cell": 36864},
    ],
)
def test_engine_identity_unshared_layout_differs_per_world_size(
    config: SimpleNamespace, facts: dict[str, Any]
) -> None:
    specs = [spec_of(1, **facts), spec_of(2, **facts)]
    assert shared_layout(specs[1]) is None
    one, two = (
        identity(config, spec.config, shared=shared_layout(spec)) for spec in specs
    )
    assert one.digest != two.digest


def test_engine_identity_changed_hash_seed_differs_in_hash_seed(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = identity(config, offloading)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert [
        difference.field for difference in ours.diff(identity(config, offloading))
    ] == ["hash.seed"]


def test_engine_identity_unnamed_adapters_raises(
    config: SimpleNamespace, offloading: SimpleNamespace
) -> None:
    config.lora_config = SimpleNamespace(
        lora_dtype="torch.float16", target_modules=None
    )
    with pytest.raises(ConfigurationError, match="option adapters"):
        identity(config, offloading)
    first, second = (
        identity(config, offloading, adapters=name) for name in ("v1", "v2")
    )
    assert [difference.field for difference in first.diff(second)] == ["adapters.name"]


def test_engine_identity_unreadable_weights_without_name_raises(
    config: SimpleNamespace, offloading: SimpleNamespace
) -> None:
    config.load_config.load_format = "tensorizer"
    with pytest.raises(ConfigurationError, match="option weights"):
        identity(config, offloading)
    assert identity(config, offloading, weights="v7").fields["weights"] == "named:v7"


def test_engine_identity_dummy_weights_with_other_seed_differ_in_weights(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
) -> None:
    config.load_config.load_format = "dummy"
    ours = identity(config, offloading)
    config.model_config.seed = 1
    assert [
        difference.field for difference in ours.diff(identity(config, offloading))
    ] == ["weights"]


def test_engine_identity_changed_draft_model_differs_in_its_weights(
    config: SimpleNamespace,
    offloading: SimpleNamespace,
    tmp_path: Path,
) -> None:
    ours = identity(config, offloading)
    draft = copy.copy(config.model_config)
    draft.model = str(make_model(tmp_path / "draft", seed=3))
    config.speculative_config = SimpleNamespace(
        method="eagle", draft_model_config=draft
    )
    first = identity(config, offloading)
    assert first.digest != ours.digest
    make_model(tmp_path / "draft", seed=4)
    assert [
        difference.field for difference in first.diff(identity(config, offloading))
    ] == ["speculation.weights"]


@pytest.mark.parametrize(
    ("usage", "expected"), [(0.0, True), (0, True), (0.001, False), (None, False)]
)
def test_has_no_kv_only_a_known_usage_of_zero_counts(
    usage: float | None, expected: bool
) -> None:
    assert (
        has_no_kv(SimpleNamespace(kv_cache_manager=SimpleNamespace(usage=usage)))
        == expected
    )


def test_has_no_kv_unknown_scheduler_counts_as_holding_kv() -> None:
    assert not has_no_kv(None)
    assert not has_no_kv(SimpleNamespace())


def test_has_random_hashes_depends_on_algorithm_and_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    assert not has_random_hashes("sha256")
    assert has_random_hashes("xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert not has_random_hashes("xxhash")
