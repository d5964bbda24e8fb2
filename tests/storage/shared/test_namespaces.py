"""Cost of the namespaces of a store that no engine uses."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from persistkv.storage.backend import CommitBatch, Namespace
from persistkv.storage.catalogue.rows import encode_namespace
from persistkv.storage.format.seal import PLAIN
from persistkv.storage.policy import Policy
from persistkv.storage.shared.format import NO_NAMESPACE, StoreNames, seal_object
from persistkv.storage.shared.index import totals as totals_module
from persistkv.storage.shared.index.totals import Totals
from persistkv.testing.conformance.suite import sample_identity
from tests.storage.shared.town import NAMESPACE, START, Town, pack

NAMES = StoreNames()
HOUR_S = 3600.0
IDLE = 10_000


def fill(town: Town, number: int) -> None:
    """Put namespaces without engines into the store, as their engines have left them."""
    ages = [(START - 1000.0 + step, 1000 * (step + 1)) for step in range(64)]
    body = msgspec.msgpack.encode(Totals(64_000, ages))
    for index in range(1, number + 1):
        identity = sample_identity(index)
        namespace = identity.digest
        name = NAMES.identity(namespace)
        content = encode_namespace(Namespace(identity, START))
        town.server.put(name, [seal_object(name, content, PLAIN, NO_NAMESPACE)])
        name = NAMES.totals + namespace.hex()
        town.server.put(name, [seal_object(name, body, PLAIN, namespace)])


def test_opening_beside_ten_thousand_namespaces_reads_none_of_them(town: Town) -> None:
    fill(town, IDLE)
    began = time.process_time()
    engine = town.engine(capacity=1 << 40)
    assert time.process_time() - began < 5.0
    assert len(engine.blobs.calls) < 15
    engine.store(pack(1))


def test_handle_holds_200_open_namespaces(town: Town) -> None:
    engine = town.engine()
    for number in range(1, 200):
        engine.open(number)
    engine.store(pack(1, namespace=engine.namespace))
    assert engine.held(engine.namespace) == {
        pack(1, namespace=engine.namespace).pack_id
    }


def test_handle_opens_namespace_in_little_address_space(tmp_path: Path) -> None:
    """The replica's memory map is halved until it fits."""
    limit = (8 << 30, 8 << 30)  # 8 GiB
    program = [sys.executable, "-c", _STORE_AND_COUNT, str(tmp_path)]
    result = subprocess.run(
        program,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr


_STORE_AND_COUNT = """
import sys
from pathlib import Path
from tests.storage.shared.town import pack, town_of
with town_of(Path(sys.argv[1])) as town:
    engine = town.engine(cache="machine")
    engine.store(pack(1))
    print(len(engine.held()))
"""


@pytest.mark.slow
def test_idle_namespaces_are_read_once_and_cost_one_page_of_a_list_a_minute(
    town: Town,
) -> None:
    fill(town, 3000)
    engine = town.engine(capacity=1 << 40)
    town.run(120)
    assert engine.calls("read", NAMES.totals) == 3000
    before = engine.calls("list", NAMES.totals)
    for seed in range(30):  # minutes
        engine.store(pack(seed))
        town.run(60)
    assert engine.calls("read", NAMES.totals) <= 3001
    assert (engine.calls("list", NAMES.totals) - before) * 3 <= 33


def test_horizon_of_ten_thousand_namespaces_is_found_in_seconds(town: Town) -> None:
    everything: list[Totals] = []
    for index in range(IDLE):
        oldest = START + 64 * index
        ages = [(oldest + step, 1000 * (step + 1)) for step in range(64)]
        everything.append(Totals(64_000, ages))
    began = time.process_time()
    horizon = totals_module.eviction_horizon(everything, 320_000_000, free=20_000_000)
    assert time.process_time() - began < 5.0
    used = sum(totals.used_until(horizon) for totals in everything)
    assert 340_000_000 <= used <= 340_064_000


def test_namespace_without_content_has_no_totals(town: Town) -> None:
    engine = town.engine(capacity=1 << 30)
    engine.store(pack(1))
    town.run(120)
    assert town.names(NAMES.totals) == [NAMES.totals + NAMESPACE.hex()]
    engine.backend.commit(NAMESPACE, CommitBatch(deletions=[pack(1).pack_id]))
    town.run(400)
    assert town.names(NAMES.totals) == []
    engine.store(pack(2))
    town.run(400)
    assert town.names(NAMES.totals) == [NAMES.totals + NAMESPACE.hex()]


def test_namespace_without_engine_that_has_expired_has_no_totals(town: Town) -> None:
    old = town.engine(ttl_s=HOUR_S)
    old.store(pack(1))
    town.run(120)
    town.stop(old)
    other = town.engine(opens=False, ttl_s=HOUR_S)
    other.open(1)
    assert other.backend.policy() == Policy(None, HOUR_S)
    town.run(3 * HOUR_S)
    assert town.names(NAMES.totals) == []


def test_totals_that_are_junk_are_read_once_and_open_nothing(town: Town) -> None:
    first = town.engine(capacity=1 << 20)
    first.store(pack(1))
    town.server.put(f"{NAMES.totals}ab", [b"junk"])
    town.server.put(f"{NAMES.totals}{'ab' * 16}", [b"junk"])
    town.run(3600)
    assert first.calls("read", "ab" * 16) == 1
    assert first.calls("read", "totals/ab") == 1
