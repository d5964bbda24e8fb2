"""Objects of the index that others include: when they are deleted, and what happens if the others
vanish."""

from __future__ import annotations

import pytest

from persistkv.storage.blobs import RefusedError
from persistkv.storage.shared.format import Delta
from tests.storage.shared.town import Engine, Town, pack


def store_each(town: Town, engine: Engine, seeds: range, pause_s: float = 5) -> None:
    """Let an engine commit packs one by one, each of which is merged alone."""
    for seed in seeds:
        engine.store(pack(seed))
        town.run(pause_s)


def includes_of_segments(town: Town) -> int:
    """Return the largest number of names that an object of the index includes."""
    contents: list[Delta] = [town.delta(name) for name in town.names("/index/")]
    return max((len(delta.includes) for delta in contents), default=0)


def test_includer_that_vanishes_takes_only_what_it_alone_names(town: Town) -> None:
    first = town.engine()
    store_each(town, first, range(2))
    inner, outer = town.names("/index/")
    assert inner in town.delta(outer).includes
    town.server.delete([outer])
    town.run(1500)
    assert pack(0).pack_id in town.fresh()
    store_each(town, first, range(2, 4), pause_s=700)
    assert pack(0).pack_id in town.fresh()


def test_short_lived_engines_delete_what_they_have_included(town: Town) -> None:
    counts: list[int] = []
    for number in range(8):
        engine = town.engine(cache="machine")
        store_each(town, engine, range(15 * number, 15 * number + 15), pause_s=60)
        town.stop(engine)
        counts.append(len(town.names("/index/")))
    assert max(counts) <= 40
    assert len(town.fresh()) == 120


def test_commits_that_cannot_be_deleted_are_merged_once(town: Town) -> None:
    first = town.engine()
    first.blobs.fail("delete", RefusedError("forbidden"))
    for seed in range(20):
        first.store(pack(seed))
    town.run(1200)
    before = first.calls("read", "/inbox/"), len(town.names("/index/"))
    town.run(7200)
    assert (first.calls("read", "/inbox/"), len(town.names("/index/"))) == before


def test_included_names_that_are_carried_on_are_bounded(
    town: Town,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("persistkv.storage.shared.index.merge.MOST_CARRIED", 10)
    first = town.engine()
    first.blobs.fail("delete", RefusedError("forbidden"))
    store_each(town, first, range(60))
    assert includes_of_segments(town) <= 20
    assert len(town.fresh()) == 60


def test_totals_that_are_refused_stop_no_merge(town: Town) -> None:
    town.stop(town.engine(capacity=1 << 30))
    first = town.engine()
    failing = first.blobs
    put = failing.inner.put

    def refuse(name: str, pieces: object) -> float:
        if "totals/" in name:
            raise RefusedError("forbidden")
        return put(name, pieces)  # type: ignore[arg-type]

    failing.inner.put = refuse  # type: ignore[method-assign]
    store_each(town, first, range(10), pause_s=30)
    assert town.names("/inbox/") == []
    assert len(town.names("/index/")) > 0


def test_index_object_that_alone_is_refused_costs_its_content_only(town: Town) -> None:
    first = town.engine(capacity=1 << 30)
    first.store(*(pack(seed) for seed in range(100, 140)))
    town.run(5)
    (large,) = town.names("/index/")
    first.store(pack(1))
    town.run(5)
    assert len(town.names("/index/")) == 2

    def refuse(name: str) -> None:
        if name == large:
            raise RefusedError("forbidden")

    late = town.engine(opens=False)
    late.blobs.before("read", lambda name, *rest: refuse(name))
    late.open()
    assert late.held() == {pack(1).pack_id}
    late.store(pack(2))
    town.run(60)
    assert pack(2).pack_id in first.held()
    late.blobs.clear_faults()
    town.run(120)
    assert len(late.held()) == 42
