"""From one placement to the other: what moves, what does not, and what a kill leaves."""

import random
import subprocess
import sys
import time

import pytest

from persistkv.config import StoreUrl
from persistkv.errors import ConfigurationError, StoreError, StoreFullError
from persistkv.storage.backend import CommitBatch
from persistkv.testing.conformance.suite import check_totals, read_pack, tables
from persistkv.testing.samples import payload_of, sample_manifest, sample_pack
from persistkv_lmdb import LmdbBackend, moving
from persistkv_lmdb.check import find_faults

OTHER = {"inline": "extents", "extents": "inline"}


@pytest.fixture
def open_any(path):
    """Opens the store whatever its placement."""
    opened = []

    def open_any(options="", **keywords):
        opened.append(LmdbBackend.open(StoreUrl.parse(f"lmdb://{path}{options}"), **keywords))
        return opened[-1]

    yield open_any
    for backend in opened:
        backend.close()


def fill(backend, namespace, count=12):
    packs = [sample_pack(namespace, seed, blocks=1 + seed % 5, block_bytes=200_001) for seed in range(count)]
    for number, pack in enumerate(packs):
        batch = CommitBatch([pack], [sample_manifest(f"r{number}", number, packs=[pack.pack_id])])
        backend.commit(namespace, batch)
    return packs


def where(backend):
    """Packs in extents, packs in pieces."""
    with backend._environment.transaction() as transaction:
        extents = transaction.txn.stat(transaction.db.extents)["entries"]
        pieces = {bytes(key[:32]) for key, _ in transaction.txn.cursor(transaction.db.pieces)}
    return extents, len(pieces)


def test_moves_and_changes_nothing_else(open_any, identity, placement):
    backend = open_any(f"?capacity=64MiB&placement={placement}")
    namespace = backend.open_namespace(identity).id
    packs = fill(backend, namespace)
    cursor, before = backend.changes(namespace, None).cursor, check_totals(backend)
    steps = list(backend.move(OTHER[placement]))
    assert [steps[0].moved_bytes, steps[-1].moved_bytes] == [0, before.stored_bytes]
    assert {step.total_bytes for step in steps} == {before.stored_bytes}
    assert where(backend) == {"inline": (12, 0), "extents": (0, 12)}[placement]
    for pack in packs:
        assert read_pack(backend, namespace, pack.table) == payload_of(pack)
    assert backend.changes(namespace, cursor).added == []
    assert len(list(backend.manifests(namespace))) == 12
    after = check_totals(backend)
    assert (after.packs, after.stored_bytes) == (before.packs, before.stored_bytes)
    assert find_faults(backend._environment) == []
    fresh = sample_pack(namespace, 100)
    backend.commit(namespace, CommitBatch([fresh]))
    assert where(backend) == {"inline": (13, 0), "extents": (0, 13)}[placement]
    assert list(backend.move(OTHER[placement]))[-1].total_bytes == 0
    backend.close()
    with pytest.raises(ConfigurationError, match="persistkv move"):
        open_any(f"?placement={placement}")
    assert open_any(f"?placement={OTHER[placement]}").stats().packs == 13


def test_segments_give_back_what_left_them(open_any, path, identity):
    backend = open_any("?capacity=64MiB&placement=extents")
    namespace = backend.open_namespace(identity).id
    fill(backend, namespace)
    list(backend.move("inline"))
    assert sum(file.stat().st_size for file in (path / "segments").iterdir()) == 0
    for seed in range(100, 160):  # the catalogue may have all of the capacity
        backend.commit(namespace, CommitBatch([sample_pack(namespace, seed, blocks=12, block_bytes=100_000)]))
        assert check_totals(backend).disk_bytes <= 64 << 20
    assert backend.stats().stored_bytes > 48 << 20


def test_there_and_back_at_a_full_store(open_any, identity, placement):
    """Where there is no room, nothing moves; a larger capacity has room."""
    backend = open_any(f"?capacity=16MiB&placement={placement}")
    namespace = backend.open_namespace(identity).id
    written = {}
    for seed in range(80):
        pack = sample_pack(namespace, seed, blocks=4, block_bytes=70_001)
        written[pack.pack_id] = pack
        backend.commit(namespace, CommitBatch([pack]))
    held = set(tables(backend, namespace))
    if placement == "inline":  # data.mdb keeps all that it has; segments give back what leaves them
        with pytest.raises(StoreFullError, match=r"capacity=\d+ or more"):
            list(backend.move("extents"))
        assert where(backend) == (0, len(held))
    backend.close()
    backend = open_any("?capacity=48MiB")
    for to in (OTHER[placement], placement, OTHER[placement]):
        list(backend.move(to))
        assert find_faults(backend._environment) == []
        assert check_totals(backend).disk_bytes <= 48 << 20
        assert set(tables(backend, namespace)) == held
    for pack_id, table in tables(backend, namespace).items():
        assert read_pack(backend, namespace, table) == payload_of(written[pack_id])


def test_pack_that_fits_nowhere_beside_the_segments(open_any, identity):
    backend = open_any("?capacity=16MiB&placement=extents")
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1, blocks=8, block_bytes=1 << 20)]))
    with pytest.raises(StoreFullError, match=r"capacity=\d+ or more"):
        list(backend.move("inline"))
    assert where(backend) == (1, 0)
    assert find_faults(backend._environment) == []


def test_engines_write_meanwhile(open_any, identity, placement):
    backend, other = open_any(f"?capacity=64MiB&placement={placement}"), open_any()
    namespace = backend.open_namespace(identity).id
    packs = fill(backend, namespace, 30)
    for number, _ in enumerate(backend.move(OTHER[placement])):
        fresh = sample_pack(namespace, 1000 + number)
        other.commit(namespace, CommitBatch([fresh], deletions=[packs.pop(0).pack_id]))
        packs.append(fresh)
    for pack in packs:
        assert read_pack(other, namespace, pack.table) == payload_of(pack)
    assert where(backend)[placement == "extents"] == len(packs)
    assert find_faults(backend._environment) == []


@pytest.mark.parametrize("to", ["", "tape", "Inline"])
def test_unknown_placement(backend, to):
    with pytest.raises(ConfigurationError, match="one of inline, extents"):
        list(backend.move(to))


def test_read_only_does_not_move(open_any, placement):
    open_any(f"?placement={placement}").close()
    with pytest.raises(StoreError, match="read-only"):
        open_any(read_only=True).move("inline")


def test_half_moved_store_evicts_what_helps(open_any, identity, monkeypatch):
    """Packs that still lie inline are the oldest, but give nothing to the segments."""
    monkeypatch.setattr(moving, "_STEP_BYTES", 1 << 20)
    backend = open_any("?capacity=48MiB&placement=inline")
    namespace = backend.open_namespace(identity).id
    fill(backend, namespace, 30)
    steps = backend.move("extents")
    for _ in range(6):
        next(steps)
    inline = where(backend)[1]
    assert 0 < inline < 30
    evicted = 0
    for seed in range(100, 160):
        pack = sample_pack(namespace, seed, blocks=10, block_bytes=100_000)
        evicted += len(backend.commit(namespace, CommitBatch([pack])).evicted)
        assert check_totals(backend).disk_bytes <= 48 << 20
    assert evicted > 10
    assert where(backend)[1] == inline
    assert find_faults(backend._environment) == []


MOVE = """
import sys
from persistkv.storage.registry import open_backend
backend = open_backend(sys.argv[1])
for step in backend.move(sys.argv[2]):
    print(step.moved_bytes, flush=True)
"""


def test_killed_moves_are_finished(open_any, path, identity, placement, monkeypatch):
    """Each kill leaves each pack in one place or the other."""
    backend = open_any(f"?capacity=96MiB&placement={placement}")
    namespace = backend.open_namespace(identity).id
    packs = fill(backend, namespace, 40)
    expected = {pack.pack_id: payload_of(pack) for pack in packs}
    backend.close()
    script = MOVE.replace("backend =", "import persistkv_lmdb.moving as m; m._STEP_BYTES = 1 << 20\nbackend =")
    draw = random.Random(7)
    to, between = OTHER[placement], 0
    for _ in range(12):
        command = [sys.executable, "-c", script, f"lmdb://{path}", to]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            for _ in range(draw.randint(2, 12)):
                process.stdout.readline()
            time.sleep(draw.uniform(0.0, 0.01))
            process.kill()
            process.stdout.read()
        backend = open_any()
        assert find_faults(backend._environment) == []
        held = tables(backend, namespace)
        assert {pack_id: read_pack(backend, namespace, table) for pack_id, table in held.items()} == expected
        check_totals(backend)
        both = where(backend)
        between += 0 not in both
        if both[to == "extents"] == 0:
            to = OTHER[to]
        backend.close()
    assert between
    backend = open_any()
    list(backend.move(to))
    assert where(backend)[to == "extents"] == 0
    assert find_faults(backend._environment) == []
