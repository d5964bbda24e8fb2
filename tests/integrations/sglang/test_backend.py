"""The backend keeps SGLang's contract, and serves no wrong KV."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from persistkv import ConfigurationError
from tests.integrations.sglang.conftest import (
    Open,
    fill,
    is_equal,
    make_pool,
    page_keys,
    pages_of,
)
from tests.integrations.sglang.host_pools import page_indices
from tests.integrations.sglang.preparation import HAS_SGLANG
from tests.integrations.sglang.stand_ins import HostPool, PoolTransfer

if TYPE_CHECKING:
    from persistkv.integrations.sglang.backend import PersistKVStorage


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_v1_pages_are_restored_by_another_process(
    open_backend: Open,
    layout: str,
) -> None:
    pool, keys = make_pool(layout), page_keys(range(8))
    fill(pool, 1)
    backend = open_backend(pool)
    assert backend.batch_set_v1(keys, page_indices(0, 8)) == [True] * 8
    assert backend.batch_exists([*keys, *page_keys(range(90, 91))]) == 8
    backend.close()

    other = make_pool(layout)
    again = open_backend(other)
    assert again.exists(keys[3])
    # in another order, and into other pages
    found = again.batch_get_v1([*keys[::-1], "missing"], page_indices(10, 9))
    assert found == [True] * 8 + [False]
    for place, page in enumerate(reversed(range(8))):
        assert is_equal(pages_of(pool, page, 1), pages_of(other, 10 + place, 1))
    assert not pages_of(other, 0, 10).view(torch.uint8).any()


@pytest.mark.parametrize("tokens_per_s", [None, 1.0, 1e12])
def test_batch_exists_reports_pages_if_loading_is_faster_than_computing(
    open_backend: Open,
    tokens_per_s: float | None,
) -> None:
    pool = make_pool()
    backend = open_backend(pool, prefill_tokens_per_s=tokens_per_s)
    keys, indices = page_keys(range(8)), page_indices(0, 8)
    assert backend.batch_set_v1(keys, indices) == [True] * 8
    assert backend.batch_exists(keys) == 8, "nothing is known of the store"
    assert backend.batch_get_v1(keys, indices) == [True] * 8
    is_declined = tokens_per_s == 1e12
    assert backend.batch_exists(keys) == (0 if is_declined else 8)
    result = backend.batch_exists_v2(keys)
    assert result.kv_hit_pages == (0 if is_declined else 8)


def test_calls_in_a_forked_child_fail_without_an_exception(open_backend: Open) -> None:
    backend = open_backend(make_pool())
    keys, indices = page_keys(range(4)), page_indices(0, 4)
    assert backend.batch_set_v1(keys, indices) == [True] * 4
    child = os.fork()
    if not child:
        signal.alarm(60)  # instead of a hang
        status = 1
        try:
            assert backend.batch_exists(keys) == 0
            assert backend.batch_get_v1(keys, indices) == [False] * 4
            assert backend.batch_set_v1(keys, indices) == [False] * 4
            backend.close()
            status = 0
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert backend.batch_get_v1(keys, indices) == [True] * 4


def test_engines_of_tenants_share_no_page_and_clear_their_own(
    open_backend: Open,
) -> None:
    keys, indices = page_keys(range(4)), page_indices(0, 4)
    pools: dict[str, HostPool] = {}
    for seed, tenant in enumerate(("default", "anna", "berta"), 30):
        pools[tenant] = make_pool()
        fill(pools[tenant], seed)
        backend = open_backend(pools[tenant], tenant=tenant)
        assert backend.batch_exists(keys) == 0, "pages of another tenant"
        assert backend.batch_set_v1(keys, indices) == [True] * 4
    for tenant, pool in pools.items():
        other = make_pool()
        backend = open_backend(other, tenant=tenant)
        assert backend.batch_get_v1(keys, indices) == [True] * 4
        assert is_equal(pages_of(pool, 0, 4), pages_of(other, 0, 4))
    open_backend(make_pool(), tenant="anna").clear()
    for tenant in pools:
        held = open_backend(make_pool(), tenant=tenant).batch_exists(keys)
        assert held == (0 if tenant == "anna" else 4)


@pytest.mark.parametrize("tenant", ["", "a\nb", "x" * 129])
def test_malformed_tenant_is_refused(open_backend: Open, tenant: str) -> None:
    with pytest.raises(ConfigurationError, match="option tenant"):
        open_backend(make_pool(), tenant=tenant)


def test_layer_first_engine_misses_page_first_pages(open_backend: Open) -> None:
    """SGLang's file backend hands them over: 94 % of the numbers are wrong."""
    one, other = make_pool("page_first"), make_pool("layer_first")
    fill(one, 2)
    keys = page_keys(range(4))
    assert all(open_backend(one).batch_set_v1(keys, page_indices(0, 4)))
    backend = open_backend(other)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, page_indices(0, 4)) == [False] * 4
    assert not other.kv_buffer.view(torch.uint8).any()


def test_float16_engine_misses_bfloat16_pages(open_backend: Open) -> None:
    one, other = make_pool(dtype=torch.bfloat16), make_pool(dtype=torch.float16)
    fill(one, 3)
    keys = page_keys(range(4))
    assert all(open_backend(one).batch_set_v1(keys, page_indices(0, 4)))
    backend = open_backend(other)
    assert backend.batch_exists(keys) == 0
    assert backend.batch_get_v1(keys, page_indices(0, 4)) == [False] * 4
    assert not other.kv_buffer.view(torch.uint8).any()


@pytest.mark.parametrize(
    ("config", "changed"),
    [
        ({"tp_rank": 1, "tp_size": 2}, {}),
        ({"pp_rank": 1, "pp_size": 2}, {}),
        ({"attn_cp_rank": 1, "attn_cp_size": 2}, {}),
        ({}, {"weights": "weights-2"}),
        ({}, {"attention_backend": "fa3"}),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}),
    ],
)
def test_other_rank_weights_or_attention_miss(
    open_backend: Open,
    config: dict[str, object],
    changed: dict[str, object],
) -> None:
    pool, keys = make_pool(), page_keys(range(2))
    assert all(open_backend(pool).batch_set_v1(keys, page_indices(0, 2)))
    assert open_backend(pool, config=config, **changed).batch_exists(keys) == 0
    assert open_backend(pool, config={"model_name": "/other/path"}).batch_exists(keys)


def test_ranks_of_mla_models_share_pages(open_backend: Open) -> None:
    mla = {"is_mla_model": True, "tp_size": 2}
    pool, keys = make_pool(), page_keys(range(2))
    first = open_backend(pool, config={**mla, "tp_rank": 0})
    second = open_backend(pool, config={**mla, "tp_rank": 1})
    assert all(first.batch_set_v1(keys, page_indices(0, 2)))
    assert _arrives(second, keys)
    # the state of Mamba layers is divided among the ranks
    for backend in (first, second):
        backend.register_mem_host_pool_v2(make_pool(), "mamba")
    transfers = [_transfer("mamba", keys, page_indices(0, 2))]
    assert first.batch_set_v2(transfers) == {"mamba": [True, True]}
    assert first.batch_get_v2(transfers) == {"mamba": [True, True]}
    assert second.batch_get_v2(transfers) == {"mamba": [False, False]}


def _arrives(backend: PersistKVStorage, keys: list[str]) -> bool:
    """Return whether pages that another backend has stored are found: it looks for them each
    second."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if backend.batch_get_v1(keys, page_indices(4, len(keys))) == [True] * len(keys):
            return True
        time.sleep(0.1)
    return False


def _transfer(
    name: str,
    keys: list[str],
    host_indices: torch.Tensor | None = None,
    **more: object,
) -> PoolTransfer:
    from sglang.srt.mem_cache import hicache_storage

    transfer: PoolTransfer = hicache_storage.PoolTransfer(
        name=hicache_storage.PoolName(name),
        keys=keys,
        host_indices=host_indices,
        **more,
    )
    return transfer


@pytest.mark.parametrize("missing", ["url", "attention_backend"])
def test_missing_option_is_refused(
    open_backend: Open,
    options: dict[str, object],
    missing: str,
) -> None:
    del options[missing]
    with pytest.raises(ConfigurationError, match=missing):
        open_backend()
    with pytest.raises(ConfigurationError, match=missing):
        open_backend(**{missing: ""}).register_mem_pool_host(make_pool())


def test_weights_are_required_and_fingerprinted(
    open_backend: Open,
    options: dict[str, object],
    tmp_path: Path,
) -> None:
    del options["weights"]
    with pytest.raises(ConfigurationError, match="model_path"):
        open_backend()
    file = tmp_path / "checkpoint" / "model.bin"
    file.parent.mkdir()
    file.write_bytes(b"one")
    pool, keys = make_pool(), page_keys(range(2))
    model = {"model_path": str(file.parent)}
    assert all(open_backend(pool, **model).batch_set_v1(keys, page_indices(0, 2)))
    assert open_backend(pool, **model).batch_exists(keys) == 2
    file.write_bytes(b"two")
    assert open_backend(pool, **model).batch_exists(keys) == 0


def test_opaque_dtype_is_refused_without_its_name(open_backend: Open) -> None:
    pool = make_pool()
    pool.dtype = torch.uint8
    with pytest.raises(ConfigurationError, match="kv_cache_dtype"):
        open_backend(pool)


# Interface without v1


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_pages_in_tensors_are_restored(open_backend: Open, layout: str) -> None:
    pool, keys = make_pool(layout), page_keys(range(4))
    fill(pool, 4)
    backend = open_backend(pool, interface_v1=0)
    values = [pool.get_data_page(page * 16, flat=True) for page in range(4)]
    assert backend.batch_set(keys, values)
    assert backend.set("one more", values[0])
    assert backend.batch_exists([*keys, "missing"]) == 4
    targets = [pool.get_dummy_flat_data_page() for _ in range(5)]
    loaded = backend.batch_get([*keys, "missing"], targets)
    assert loaded[4] is None
    for value, tensor in zip(values, loaded, strict=False):
        assert is_equal(value, tensor)
    assert backend.get("missing", targets[0]) is None
    assert is_equal(backend.get("one more", targets[0]), values[0])
    # the bytes have another order than in the pool: v1 does not see them
    assert open_backend(pool).batch_exists(keys) == 0


# Interface v2


@pytest.fixture
def hybrid(open_backend: Open) -> PersistKVStorage:
    """A backend with a main pool, and pools of Mamba states, a sliding window, an indexer and a
    draft model."""
    backend = open_backend(make_pool())
    pools = {"mamba": 1, "swa": 2, "indexer": 1, "draft": 2}
    for name, heads in pools.items():
        backend.register_mem_host_pool_v2(make_pool(heads=heads), name)
    return backend


def test_v2_transfers_of_several_pools(hybrid: PersistKVStorage) -> None:
    names = ["mamba", "swa", "indexer", "draft"]
    keys = page_keys(range(3))
    for seed, name in enumerate(names):
        fill(hybrid.registered_pools[name], seed)
    transfers = [_transfer(name, keys, page_indices(0, 3)) for name in names]
    stored = hybrid.batch_set_v2(transfers)
    assert {str(name): result for name, result in stored.items()} == dict.fromkeys(
        names, [True] * 3
    )
    targets = [_transfer(name, keys, page_indices(8, 3)) for name in names]
    hybrid.batch_get_v2(targets)
    for name in names:
        pool = hybrid.registered_pools[name]
        assert is_equal(pages_of(pool, 0, 3), pages_of(pool, 8, 3)), name
    # a pool that nobody has registered, and too few indices
    other = [
        _transfer("auxiliary_swa" if HAS_SGLANG else "kv", keys, page_indices(0, 2)),
        _transfer("swa", keys, None),
    ]
    assert list(hybrid.batch_get_v2(other).values()) == [[False] * 3] * 2
    assert list(hybrid.batch_set_v2(other).values()) == [[False] * 3] * 2


def _store(backend: PersistKVStorage, name: str, held: str) -> list[str]:
    """Store the pages of a pool whose letter is ``x``; return the keys of all."""
    keys = page_keys(range(len(held)))
    for page, letter in enumerate(held):
        if letter == "x":
            transfer = _transfer(name, keys[page : page + 1], page_indices(page, 1))
            assert backend.batch_set_v2([transfer])
    return keys


@pytest.mark.parametrize(
    ("kv", "other", "policy", "trailing", "expected"),
    [
        ("xxxx-", "xx-x-", "all_pages", 0, (2, {"kv": 4, "swa": 2}, [1, 2])),
        ("xxxx-", "-----", "all_pages", 0, (0, {"kv": 4}, [])),
        ("xx---", "xxxxx", "all_pages", 0, (2, {"kv": 2, "swa": 2}, [1, 2])),
        ("xxxxx", "--x-x", "trailing_pages", 1, (5, {"kv": 5, "swa": 5}, [3, 5])),
        ("xxxxx", "-xx-x", "trailing_pages", 2, (3, {"kv": 5, "swa": 3}, [3])),
        ("xxx--", "xxxxx", "trailing_pages", 2, (3, {"kv": 3, "swa": 3}, [1, 2, 3])),
        ("-xxxx", "xxxxx", "trailing_pages", 1, (0, {}, [])),
    ],
)
def test_v2_hit_policies(
    hybrid: PersistKVStorage,
    kv: str,
    other: str,
    policy: str,
    trailing: int,
    expected: tuple[int, dict[str, int], list[int]],
) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    keys = page_keys(range(len(kv)))
    for page, letter in enumerate(kv):
        if letter == "x":
            assert all(
                hybrid.batch_set_v1(keys[page : page + 1], page_indices(page, 1))
            )
    _store(hybrid, "swa", other)
    transfer = _transfer(
        "swa", keys[len(keys) - trailing :], hit_policy=PoolHitPolicy(policy)
    )
    result = hybrid.batch_exists_v2(keys, [transfer])
    hits = {str(name): pages for name, pages in result.extra_pool_hit_pages.items()}
    found = result.kv_hit_pages, hits, result.restorable_prefix_pages
    assert found == expected


def test_v2_block_groups_never_limit_the_prefix(hybrid: PersistKVStorage) -> None:
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy

    keys = page_keys(range(8))
    assert all(hybrid.batch_set_v1(keys, page_indices(0, 8)))
    groups = page_keys(range(100, 106))
    transfer = _transfer("indexer", groups[:5], page_indices(0, 5))
    assert hybrid.batch_set_v2([transfer])
    # two of three groups of two keys are whole; each covers four pages
    blocks = _transfer(
        "indexer",
        groups,
        hit_policy=PoolHitPolicy.BLOCK_GROUPS,
        block_pages=4,
        group_pages=2,
    )
    result = hybrid.batch_exists_v2(keys, [blocks])
    assert result.kv_hit_pages == 8
    assert result.extra_pool_hit_pages["indexer"] == 8
    assert hybrid.batch_exists_v2(keys).kv_hit_pages == 8


# The rest


def test_clear_deletes_only_pages_of_this_identity(open_backend: Open) -> None:
    pool, keys = make_pool(), page_keys(range(6))
    backend, other = open_backend(pool), open_backend(pool, weights="weights-2")
    for one in (backend, other):
        assert all(one.batch_set_v1(keys, page_indices(0, 6)))
    backend.clear()
    assert backend.batch_exists(keys) == 0
    assert other.batch_exists(keys) == 6
    assert all(backend.batch_set_v1(keys, page_indices(0, 6)))


def test_stats_are_those_since_the_last_call(open_backend: Open) -> None:
    pool, keys = make_pool(), page_keys(range(6))
    backend = open_backend(pool)
    assert all(backend.batch_set_v1(keys, page_indices(0, 6)))
    backend.batch_get_v1(keys[:2], page_indices(8, 2))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([6], [2])
    assert stats.backup_bandwidth[0] > 0 < stats.prefetch_bandwidth[0]
    assert backend.get_stats().backup_pgs == []
    quiet = open_backend(pool, config={"enable_storage_metrics": False})
    assert quiet.get_stats() is None


def test_store_that_does_not_open_costs_misses(
    open_backend: Open,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("no directory")
    backend = open_backend(make_pool(), url=f"lmdb://{tmp_path}/file/store")
    keys = page_keys(range(2))
    assert backend.batch_exists(keys) == 0
    assert backend.batch_set_v1(keys, page_indices(0, 2)) == [False, False]
    assert backend.batch_get_v1(keys, page_indices(0, 2)) == [False, False]
    assert "does not open" in caplog.text


@pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1", "batch_exists"])
def test_call_during_close_misses(open_backend: Open, call: str) -> None:
    """An exception would end SGLang's storage thread."""
    backend = open_backend(make_pool())

    class ClosingKey(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            backend.close()
            return super().encode()

    keys = [ClosingKey(key) for key in page_keys(range(1))]
    arguments = [] if call == "batch_exists" else [page_indices(0, 1)]
    assert getattr(backend, call)(keys, *arguments) in (0, [False])


def test_geometry_in_numpy_integers_is_in_the_identity(open_backend: Open) -> None:
    pool, other, keys = make_pool(), make_pool(), page_keys(range(6))
    for changed, heads, numbers in ((pool, 2, 32), (other, 4, 16)):
        # not by assignment: the pool declares plain integers
        vars(changed).update(head_num=np.int64(heads), head_dim=np.int64(numbers))
    assert all(open_backend(pool).batch_set_v1(keys, page_indices(0, 6)))
    assert open_backend(other).batch_exists(keys) == 0


@pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed")
def test_salts_and_adapters_have_keys_of_their_own() -> None:
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.utils import get_storage_hash_str

    tokens = list(range(32))
    variants = [
        RadixKey(tokens, extra_key=None),
        RadixKey(tokens, extra_key="lora-a"),
        RadixKey(tokens, extra_key="lora-b"),
    ]
    hashes = [get_storage_hash_str(key, None, page_size=16) for key in variants]
    assert len({first for first, *_ in hashes}) == len(variants)
