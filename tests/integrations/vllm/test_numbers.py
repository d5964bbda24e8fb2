"""Positions of numbers in vLLM's rows, for configurations built by hand; needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from persistkv.config import NumberLayout
from persistkv.integrations.vllm.numbers import number_layout
from persistkv.storage.identity.comparison import compare, fits

LAYERS, HEADS, TOKENS, SIZE, BLOCKS = 3, 2, 16, 32, 2
AXES = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": 2 * SIZE}


def attention(**fields: Any) -> SimpleNamespace:
    spec = {
        "num_kv_heads": HEADS,
        "head_size": SIZE,
        "head_size_v": SIZE,
        "block_size": TOKENS,
        "dtype": "torch.float32",
    }
    return SimpleNamespace(**(spec | fields))


def find_layout(
    layout: str | None = "LBHNC",
    device: str = "cuda",
    *,
    spec: SimpleNamespace | None = None,
    workers: int = 1,
    item: int = 4,
    engine: dict[str, Any] | None = None,
    **offloading: Any,
) -> NumberLayout | None:
    names = tuple(f"layers.{number}" for number in range(LAYERS))
    page = (spec or attention()).num_kv_heads * TOKENS * 2 * SIZE * item
    fields = {
        "groups": (
            SimpleNamespace(group_id=0, tokens_per_block=TOKENS, layer_names=names),
        ),
        "cache": SimpleNamespace(blocks_per_chunk=BLOCKS),
        "parallel": SimpleNamespace(world_size=workers, tp_size=workers, pp_size=1),
        "worker_kv_bytes_per_block": LAYERS * page,
        "kv_cache_layout": layout,
    }
    offloading_config = SimpleNamespace(**(fields | offloading))
    config = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"), speculative_config=None
    )
    config.cache_config.__dict__.update(engine or {})
    spec = SimpleNamespace(
        config=offloading_config,
        cpu_page_size_per_worker=LAYERS * page * BLOCKS,
        spec=spec or attention(),
    )
    kv_cache = SimpleNamespace(
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec.spec)]
    )
    return number_layout(config, spec, kv_cache, device=device)


def build_layout(*arguments: Any, **options: Any) -> NumberLayout:
    """Return the layout of a supported cache; arguments as for ``find_layout``."""
    found = find_layout(*arguments, **options)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC"])
@pytest.mark.parametrize("part", [0, 1])
def test_number_layout_changed_keys_or_values_are_found_in_their_cell(
    layout: str, part: int
) -> None:
    """A change to the keys (part 0) or values (part 1) of one head in one layer is reported for
    exactly that cell."""
    numbers = build_layout(layout)
    sizes = [AXES[axis] for axis in layout]
    row = np.random.default_rng(0).standard_normal(sizes).astype(np.float32)
    assert fits(numbers, 0, row.nbytes)
    for cell, (layer, head) in enumerate(np.ndindex(LAYERS, HEADS)):
        changed = row.copy()
        index = {"L": layer, "H": head, "C": slice(part * SIZE, (part + 1) * SIZE)}
        changed[tuple(index.get(axis, slice(None)) for axis in layout)] *= 2
        found = compare(
            numbers,
            0,
            row.reshape(-1).view(np.uint8),
            changed.reshape(-1).view(np.uint8),
        )
        assert (found.cell, found.error) == (2 * cell + part, pytest.approx(0.5))
        assert found.tokens == BLOCKS * TOKENS


def test_number_layout_on_cpu_places_keys_of_head_before_its_values() -> None:
    numbers = build_layout(device="cpu")
    row = (
        np.random.default_rng(0)
        .standard_normal((LAYERS, BLOCKS, HEADS, 2, TOKENS, SIZE))
        .astype(np.float32)
    )
    changed = row.copy()
    changed[1, :, 1, 1] *= 2
    found = compare(
        numbers, 0, row.reshape(-1).view(np.uint8), changed.reshape(-1).view(np.uint8)
    )
    assert (found.cell, found.error) == ((1 * HEADS + 1) * 2 + 1, pytest.approx(0.5))


def test_number_layout_two_workers_describes_both_parts() -> None:
    numbers = build_layout(workers=2)
    assert numbers.groups[0].cells[0] == (
        2,
        LAYERS * BLOCKS * HEADS * TOKENS * 2 * SIZE * 4,
    )


@pytest.mark.parametrize(
    ("name", "dtype", "item"),
    [("fp8", "float8_e4m3fn", 1), ("fp8_e5m2", "float8_e5m2", 1)],
)
def test_number_layout_fp8_cache_dtype_returns_float8_dtype(
    name: str, dtype: str, item: int
) -> None:
    assert build_layout(item=item, engine={"cache_dtype": name}).dtype == dtype


@pytest.mark.parametrize(
    "options",
    [
        {"layout": None},
        {"layout": "LHBNC"},
        {"layout": "LBNHC", "device": "cpu"},
        {"engine": {"calculate_kv_scales": True}},
        {"engine": {"cache_dtype": "nvfp4"}},
        {"spec": attention(kv_quant_mode=2)},
        {"spec": attention(tokens_per_state=4)},
        {"spec": attention(page_size_padded=1 << 20)},
        {"spec": attention(head_size=None)},
        {"worker_kv_bytes_per_block": 123},
        {"canonical_layout": True},
        {"parallel": SimpleNamespace(world_size=2, tp_size=1, pp_size=2)},
    ],
)
def test_number_layout_unsupported_cache_returns_none(options: dict[str, Any]) -> None:
    assert find_layout(**options) is None


def test_number_layout_speculative_decoding_returns_none() -> None:
    engine = SimpleNamespace(
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=SimpleNamespace(method="eagle"),
    )
    spec = SimpleNamespace(
        config=SimpleNamespace(
            parallel=SimpleNamespace(world_size=1), kv_cache_layout="LBHNC"
        )
    )
    assert (
        number_layout(engine, spec, SimpleNamespace(kv_cache_groups=[]), device="cuda")
        is None
    )
