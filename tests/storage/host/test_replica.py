"""The engine's copy of the index, by itself."""

from __future__ import annotations

from persistkv.storage.host.replica import Replica


class Probed(bytes):
    """A key that counts how often any of its kind was looked up."""

    probes = 0

    def __hash__(self) -> int:
        Probed.probes += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


def names(count: int, first: int = 0) -> list[bytes]:
    return [number.to_bytes(4, "big") for number in range(first, first + count)]


def test_what_came_and_went_only_went() -> None:
    replica = Replica()
    replica.add(names(4))
    replica.remove(names(2))
    assert replica.take_stored() == names(2, 2)
    assert replica.take_removed() == names(2)
    assert sorted(replica.held) == names(2, 2)


def test_what_went_and_came_back_is_told_as_both() -> None:
    replica = Replica()
    replica.add(names(2))
    replica.take_stored()
    replica.remove(names(2))
    replica.add(names(2))
    assert replica.take_removed() == names(2)
    assert replica.take_stored() == names(2)


def test_what_went_costs_the_same_however_much_nobody_took() -> None:
    replica = Replica()
    replica.add([Probed(name) for name in names(10_000)])
    gone: list[bytes] = [Probed(name) for name in names(10)]
    Probed.probes = 0
    replica.remove(gone)
    assert Probed.probes <= 10 * len(gone)


def test_what_nobody_takes_does_not_pile_up() -> None:
    replica = Replica()
    for round_ in range(100):
        replica.add(names(4_096, 4_096 * round_))
        replica.remove(names(4_096, 4_096 * round_))
    assert replica.take_stored() == []
    removed = replica.take_removed()
    assert removed == names(65_536 + 4_096, 4_096 * 83), "what went last is told"


def test_what_nobody_takes_does_not_pile_up_where_hosts_die() -> None:
    replica = Replica()
    for _ in range(20):
        replica.begin_listing()
        replica.add(names(70_000))
        replica.end_listing(news=True)
        replica.clear()
    assert len(replica.take_removed()) == 65_536 + 70_000
    assert replica.take_stored() == []


def test_what_was_held_before_news_was_taken_lets_nothing_pile_up() -> None:
    replica = Replica()
    replica.add(names(200_000))
    replica.remove(names(200_000))
    replica.take_removed()
    for start in range(0, 200_000, 4_096):
        replica.add(names(4_096, start))
        replica.remove(names(4_096, start))
    assert len(replica.take_removed()) == 65_536 + 4_096


def test_all_that_went_at_once_is_told() -> None:
    """More than may wait beside what is held: by then, nothing is."""
    replica = Replica()
    replica.add(names(200_000))
    for start in range(0, 200_000, 4_096):
        replica.remove(names(min(4_096, 200_000 - start), start))
    assert replica.take_removed() == names(200_000)


def test_all_that_went_with_a_listing_is_told() -> None:
    """An engine's host died, and its store is told anew."""
    replica = Replica()
    replica.add(names(100_000))
    replica.take_stored()
    replica.clear()
    replica.begin_listing()
    replica.add(names(100_000))
    replica.end_listing(news=True)
    replica.remove(names(1))
    removed = replica.take_removed()
    assert (sorted(removed[:-1]), removed[-1:]) == (names(100_000), names(1))
    assert sorted(replica.take_stored()) == names(99_999, 1)
