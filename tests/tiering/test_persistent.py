"""The persistent tier: conformance with each kind of host, durability, manifests and restarts."""

from __future__ import annotations

import errno
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from persistkv.base import OffloadKey, OffloadPolicy, ReqContext, Retention
from persistkv.config import OffloadingConfig
from persistkv.errors import (
    ConfigurationError,
    IdentityMismatchError,
    StoreUnavailableError,
)
from persistkv.storage import open_backend
from persistkv.storage.records import Choice
from persistkv.testing.tier_conformance import SecondaryTierConformance
from persistkv.tiering.persistent import PersistentTier
from tests.host_processes import host_processes
from tests.tiering.conftest import Described, Keys, MakeStack, persistent


class TestPersistentTierInline(SecondaryTierConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.url = f"lmdb://{tmp_path}/store"

    def open_tier(self, config: OffloadingConfig, view: memoryview) -> PersistentTier:
        return PersistentTier(config, view, url=self.url, host="thread", max_age_s=0.0)


class TestPersistentTierInThread(SecondaryTierConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.url = f"lmdb://{tmp_path}/store"

    def open_tier(self, config: OffloadingConfig, view: memoryview) -> PersistentTier:
        return PersistentTier(
            config, view, url=self.url, host="thread", codec="zstd", max_age_s=0.01
        )


def lmdb(tmp_path: Path, **options: object) -> Callable[..., PersistentTier]:
    return persistent(url=f"lmdb://{tmp_path}/store", **options)


@pytest.mark.parametrize("missing", ["descriptor", "pidfds"])
def test_persistent_tier_without_descriptor_or_pidfds_uses_thread(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    missing: str,
) -> None:
    from persistkv.config import GroupLayout, RowLayout

    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "no pidfds")

    memory = memoryview(bytearray(4096 * 4)).cast("B", (4, 4096))
    fd = None
    if missing == "pidfds":
        fd = os.memfd_create("rows")
        monkeypatch.setattr(os, "pidfd_open", refuse)
    config = OffloadingConfig(
        {"a": 1},
        16,
        RowLayout(4096, (GroupLayout(((0, 4096),)),)),
        4,
        () if fd is None else (fd,),
    )
    with caplog.at_level(logging.WARNING):
        tier = lmdb(tmp_path)(config, memory)
    assert caplog.text.count("runs in a thread") == 1
    tier.shutdown()
    if fd is not None:
        os.close(fd)


def test_persistent_tier_restarted_stack_promotes_stored_blocks(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    chains = [keys(6, 0), keys(6, 1)]
    everything = chains[0] + chains[1]
    first = make_stack(16, lmdb(tmp_path))
    req = described("a", *chains)
    assert first.manager.on_new_request(req).policy is OffloadPolicy.REQUEST_LEVEL
    first.store(everything, req)
    first.manager.on_request_finished(req)
    assert first.tiers_of(PersistentTier)[0].wait_persisted("a", 90)
    events = first.step()
    assert {event.medium for event in events} == {"CPU", "persistent"}

    second = make_stack(16, lmdb(tmp_path))
    again = described("b", *chains)
    second.manager.on_new_request(again)
    assert [second.manager.lookup(key, again) for key in everything] == [None] * 12
    assert second.promote(everything, again) == [True] * 12
    second.check(everything, second.manager.prepare_load(everything, again))
    second.manager.complete_load(everything, again)

    backend = open_backend(f"lmdb://{tmp_path}/store", read_only=True)
    (namespace,) = backend.namespaces()
    (manifest,) = backend.catalogue(namespace.id).manifests()
    assert (manifest.group_blocks, manifest.tokens) == ((6, 6, 0), 96)
    backend.close()


def test_persistent_tier_pin_and_ttl_apply_only_to_their_request(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    stack = make_stack(16, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    for name in "ab":
        names = keys(4)
        req = described(name, names)
        assert req.description is not None
        req.description.retention = Retention(
            pin=name == "a", ttl_s=3600.0 if name == "a" else None
        )
        stack.manager.on_new_request(req)
        stack.store(names, req)
        stack.manager.on_request_finished(req)
        assert tier.wait_persisted(name, 90)
    backend = open_backend(f"lmdb://{tmp_path}/store", read_only=True)
    (namespace,) = backend.namespaces()
    manifests = sorted(
        backend.catalogue(namespace.id).manifests(),
        key=lambda manifest: manifest.created,
    )
    uses = backend.catalogue(namespace.id).uses([manifest.id for manifest in manifests])
    assert [use is not None and use.pinned for use in uses] == [True, False]
    assert [manifest.ttl_s for manifest in manifests] == [3600.0, None]
    backend.close()


def test_persistent_tier_held_blocks_are_not_submitted_again(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    stack = make_stack(16, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    names = keys(4)
    for name in "abc":
        req = described(name, names)
        stack.manager.on_new_request(req)
        stack.store(names, req)
        stack.manager.on_request_finished(req)
        assert tier.wait_persisted(name, 90)
        stack.step()
    assert tier.client.stats().client.store_jobs == 1
    assert len(tier.client) == 4
    assert not stack.manager.has_pending_work()


def test_persistent_tier_host_killed_in_flight_misses_and_restarts(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    """Rows are released, lookups miss, the host restarts, and durable blocks are found again."""
    stack = make_stack(16, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    names, lost = keys(4), keys(4)
    req = described("a", names)
    stack.manager.on_new_request(req)
    stack.store(names, req)
    stack.manager.on_request_finished(req)
    assert tier.wait_persisted("a", 90)
    stack.step()
    stack.clear_primary()
    (pid,) = host_processes()
    os.kill(pid, signal.SIGSTOP)
    warm, other = described("b", names), described("c", lost)
    for context in (warm, other):
        stack.manager.on_new_request(context)
    assert [stack.manager.lookup(key, warm) for key in names] == [None] * 4
    stack.step()
    stack.store(lost, other)
    assert stack.primary.num_free_or_evictable() == 8
    os.kill(pid, signal.SIGKILL)
    assert stack.promote(names, warm) == [False] * 4
    deadline = time.monotonic() + 90
    while stack.primary.num_free_or_evictable() < 16:
        assert time.monotonic() < deadline
        stack.step()
    late = described("d", names)
    stack.manager.on_new_request(late)
    while True not in stack.promote(names, late):
        assert time.monotonic() < deadline, "the host does not restart"
        stack.step()
        time.sleep(0.01)
    assert stack.promote(names, late) == [True] * 4
    stack.check(names, stack.manager.prepare_load(names, late))
    stack.manager.complete_load(names, late)
    assert tier.wait_persisted("c", 0.1) is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "tier persistent option url"),
        (
            {"url": "lmdb:///tmp/x", "kodec": "raw"},
            "tier persistent option kodec: 'raw' .* one of adopt, codec, .*host",
        ),
        ({"url": "lmdb:///tmp/x", "codec": "lz4"}, "codec: 'lz4' .* one of raw, zstd"),
        (
            {"url": "lmdb:///tmp/x", "host": "moon"},
            "option host: 'moon' .* one of process, thread",
        ),
        ({"url": "lmdb:///tmp/x", "queue_bytes": "-5"}, "queue_bytes"),
        ({"url": "lmdb:///tmp/x", "max_age_s": "soon"}, "option max_age_s: 'soon'"),
        (
            {"url": "lmdb:///tmp/x", "durability": "5s"},
            "durability: '5s' .* commit, or interval:5s",
        ),
        (
            {"url": "lmdb:///tmp/x", "durability": "interval:0s"},
            "durability: 'interval:0s' .* positive duration",
        ),
        (
            {"url": "lmdb:///tmp/x", "durability": "commit:1s"},
            "durability: 'commit:1s'",
        ),
        (
            {"url": "lmdb:///tmp/x", "io_threads": 0},
            "option io_threads: 0 .* an integer >= 1",
        ),
        (
            {"url": "lmdb:///tmp/x", "staging_bytes": "8MiB"},
            "staging_bytes: '8MiB' .* 67108864 bytes or more",
        ),
        ({"url": "nope://x"}, "url scheme: 'nope' .* one of file, lmdb, s3"),
        ({"url": "just a path"}, "url: 'just a path'"),
    ],
)
def test_persistent_tier_invalid_option_raises_and_names_it(
    make_stack: MakeStack,
    options: dict[str, object],
    message: str,
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_stack(4, persistent(**options))


def test_persistent_tier_strict_identity_other_weights_raises(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
) -> None:
    stack = make_stack(4, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    names = keys(1)
    req = described("a", names)
    stack.manager.on_new_request(req)
    stack.store(names, req)
    stack.manager.on_request_finished(req)
    assert tier.wait_persisted("a", 90)

    def other_weights(config: OffloadingConfig, view: memoryview) -> PersistentTier:
        changed = OffloadingConfig(
            {"weights": "v"},
            config.block_size,
            config.layout,
            config.num_blocks,
            config.region_fds,
        )
        return lmdb(tmp_path, strict_identity=True)(changed, view)

    with pytest.raises(IdentityMismatchError, match="weights: 'v' here, 'w' stored"):
        make_stack(4, other_weights)


@pytest.mark.parametrize("host", ["thread", "process"])
def test_persistent_tier_unusable_store_starts_and_attaches_later(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    host: str,
) -> None:
    """A store costs time, never a start."""
    (tmp_path / "store").write_text("in the way")
    stack = make_stack(16, lmdb(tmp_path, host=host))
    (tier,) = stack.tiers_of(PersistentTier)
    chain = keys(6, 0)
    req = described("a", chain, [])
    stack.manager.on_new_request(req)
    assert tier.lookup(chain[0], req) is False
    stack.store(chain, req)
    stack.manager.on_request_finished(req)
    assert not tier.wait_persisted("a", 90)
    assert tier.client.stats().client.refused_jobs == 1

    (tmp_path / "store").unlink()
    deadline = time.monotonic() + 90
    while tier.client.stats().state != "open":
        assert time.monotonic() < deadline
        stack.step()
    again = described("b", chain, [])
    stack.manager.on_new_request(again)
    stack.store(chain, again)
    stack.manager.on_request_finished(again)
    assert tier.wait_persisted("b", 90)
    assert tier.lookup(chain[0], again) is True


@pytest.mark.parametrize("host", ["thread", "process"])
def test_persistent_tier_required_unusable_store_raises(
    make_stack: MakeStack,
    tmp_path: Path,
    host: str,
) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match="is a file"):
        make_stack(4, lmdb(tmp_path, host=host, required=True))


@pytest.mark.parametrize("host", ["thread", "process"])
def test_persistent_tier_full_store_evicts_touched_blocks_last(
    make_stack: MakeStack,
    keys: Keys,
    described: Described,
    tmp_path: Path,
    host: str,
) -> None:
    stack = make_stack(
        16,
        partial(
            PersistentTier, url=f"lmdb://{tmp_path}/store?capacity=1MiB", host=host
        ),
    )
    (tier,) = stack.tiers_of(PersistentTier)
    kept = keys(4, 2)
    hot = described("hot", [], [], kept)
    others: list[OffloadKey] = []
    for number in range(30):
        chain = keys(4, 2) if number else kept
        req = described(f"r{number}", [], [], chain) if number else hot
        stack.manager.on_new_request(req)
        stack.store(chain, req)
        stack.manager.on_request_finished(req)
        stack.manager.touch(kept, hot)
        stack.step()
        assert tier.wait_persisted(req.req_id, 90)
        others += chain if number else []
    stack.step()
    assert all(tier.lookup(key, hot) for key in kept)
    held = [bool(tier.lookup(key, hot)) for key in others]
    assert not all(held)
    assert held[-4:] == [True] * 4
    stats = tier.client.stats().host
    assert stats is not None
    assert stats.counters.dropped_blocks == 0


def test_lookup_prefix_mixed_tiers_answers_as_single_lookups(
    make_stack: MakeStack,
    keys: Keys,
    tmp_path: Path,
) -> None:
    stack = make_stack(32, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    names, request = keys(24), ReqContext("a")
    stack.manager.on_new_request(request)
    stack.store(names[:20], request)
    stack.manager.on_request_finished(request)
    assert tier.wait_persisted("a", 90)
    stack.clear_primary()
    other = ReqContext("b")
    stack.manager.on_new_request(other)
    stack.promote(names[:4], other)
    assert tier.lookup_prefix(names, other) == 20
    assert stack.manager.lookup_prefix(names, other) == [True] * 4 + [None] * 16
    assert all(stack.promote(names[:20], other))
    assert stack.manager.lookup_prefix(names, other) == [True] * 20
    assert stack.manager.lookup_prefix(names[20:], other) == []


def test_prefetch_text_without_encoding_is_ignored(
    make_stack: MakeStack,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Otherwise the request for its contexts would be repeated, and fail, in each step."""
    stack = make_stack(16, lmdb(tmp_path))
    (tier,) = stack.tiers_of(PersistentTier)
    for choice in (Choice(request="\ud800"), Choice(labels={"session": "\ud800"})):
        tier.prefetch(choice)
        assert not tier.prefetch_waits
    assert "a prefetch is ignored" in caplog.text
    tier.prefetch(Choice(labels={"session": "7"}))
    assert tier.ask_recent(1, prefetched=True)


def test_prefetch_after_changed_weights_keeps_no_engine_awake(
    make_stack: MakeStack,
    tmp_path: Path,
) -> None:
    tier = make_stack(16, lmdb(tmp_path)).tiers_of(PersistentTier)[0]
    assert isinstance(tier, PersistentTier)
    tier.prefetch(Choice(labels={"session": "7"}))
    assert tier.prefetch_waits
    tier.reset_cache(weights_changed=True)
    tier.prefetch(Choice(labels={"session": "8"}))
    assert not tier.prefetch_waits
