"""Savings of a store: recorded by several engines, folded by day, kept when content is evicted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity
from persistkv.storage.store import savings
from persistkv.storage.store.savings import STORE, SavingsRecorder, fold, read_savings
from persistkv.testing import FaultyBlobs, MemoryBackend, MemoryBlobs

ONE = Identity.of({"weights": "one", "model_name": "/models/one"})
TWO = Identity.of({"weights": "two", "model_name": "two"})

Open = Callable[[], Backend]


@pytest.fixture(params=["lmdb", "file"])
def store(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[[], Backend]]:
    opened: list[Backend] = []

    def open_one() -> Backend:
        backend = open_backend(f"{request.param}://{tmp_path}/store")
        backend.open_namespace(ONE)
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()


@pytest.fixture
def day(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that sets the present day."""

    def set_day(number: int) -> None:
        monkeypatch.setattr(savings, "today", lambda: number)

    set_day(20_000)
    return set_day


def record(backend: Backend, tokens: int, identity: Identity = ONE) -> SavingsRecorder:
    recorder = SavingsRecorder(backend, identity)
    recorder.add(tokens, {"user": "anna"}, 0, 0.0)
    recorder.write()
    return recorder


def test_savings_of_several_engines_and_models_add_up(store: Open) -> None:
    first = SavingsRecorder(store(), ONE)
    first.add(100, {"user": "anna", "app": "x"}, 1000, 2.0)
    first.add(0, {"user": "anna"}, 1000, 4.0)
    first.add(50, {"user": "ben"}, 0, 0.0)
    first.write()
    record(store(), 25)
    record(store(), 1000, TWO)
    two, one = read_savings(store())
    assert (two.model, two.requests, two.tokens) == ("two", 1, 1000)
    assert two.seconds(1000) is None
    assert (one.model, one.requests, one.tokens) == ("/models/one", 3, 175)
    assert one.seconds(175) == pytest.approx(175 * 6.0 / 2000)
    by_label = {name: (sum_.requests, sum_.tokens) for name, sum_ in one.labels.items()}
    assert by_label == {"user=anna": (2, 125), "app=x": (1, 100), "user=ben": (1, 50)}


def test_write_replaces_the_note_of_its_engine(store: Open) -> None:
    backend = store()
    recorder = record(backend, 10)
    for _ in range(3):
        recorder.add(10, {}, 0, 0.0)
        recorder.write()
    assert len(backend.note_names(STORE)) == 1
    assert read_savings(backend)[0].tokens == 40


def test_write_without_news_writes_nothing(
    store: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder = record(store(), 10)

    def fail(*_: object) -> None:
        raise AssertionError("nothing was to be written")

    monkeypatch.setattr(Backend, "put_note", fail)
    monkeypatch.setattr(type(store()), "put_note", fail)
    recorder.write()


def test_failed_write_is_repeated_by_the_next(
    store: Open,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = store()
    recorder = SavingsRecorder(backend, ONE)
    recorder.add(10, {}, 0, 0.0)

    def fail(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "put_note", fail)
        recorder.write()
    assert read_savings(backend) == []
    recorder.write()
    assert read_savings(backend)[0].tokens == 10


def test_days_are_folded_two_days_later_and_nothing_changes(
    store: Open,
    day: Callable[[int], None],
) -> None:
    backend = store()
    for number in (20_000, 20_001):
        day(number)
        record(backend, 10)
        record(store(), 20)
        record(store(), 5, TWO)
    assert len(backend.note_names(STORE)) == 6
    day(20_002)
    record(backend, 40)
    assert len(backend.note_names(STORE)) == 2 + 3 + 1
    day(20_010)
    record(backend, 80)
    names = backend.note_names(STORE)
    assert len(names) == 2 + 2 + 1 + 1
    one, two = read_savings(backend)
    assert (one.requests, one.tokens, one.labels["user=anna"].tokens) == (6, 180, 180)
    assert (two.requests, two.tokens) == (2, 10)


def test_engine_that_runs_over_midnight_begins_a_source(
    store: Open,
    day: Callable[[int], None],
) -> None:
    backend = store()
    recorder = record(backend, 10)
    day(20_001)
    recorder.add(20, {}, 0, 0.0)
    recorder.write()
    assert {name[:6] for name in backend.note_names(STORE)} == {"s20000", "s20001"}
    assert read_savings(backend)[0].tokens == 30


def test_write_that_fails_over_midnight_loses_nothing(
    store: Open,
    day: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = store()
    recorder = SavingsRecorder(backend, ONE)
    recorder.add(10, {}, 0, 0.0)

    def fail_after_midnight(*_: object) -> None:
        day(20_001)
        recorder.add(20, {}, 0, 0.0)  # by the thread of the loop
        raise StoreError("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "put_note", fail_after_midnight)
        recorder.write()
    recorder.write()
    assert read_savings(backend)[0].tokens == 30


def test_fold_beside_another_fold_loses_nothing(
    store: Open,
    day: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another engine folds the same day, between the list of the sources and their reads."""
    backend = store()
    for tokens in (10, 20, 30):
        record(backend, tokens)
    other = store()
    notes = type(backend).notes
    put_note = type(backend).put_note

    def delete_one_and_stop(
        own: Backend,
        namespace: bytes,
        name: str,
        content: bytes | None,
    ) -> None:
        put_note(own, namespace, name, content)
        if content is None:
            raise KeyboardInterrupt

    def read_late(
        own: Backend, namespace: bytes, names: Sequence[str]
    ) -> list[bytes | None]:
        monkeypatch.setattr(type(backend), "notes", notes)
        monkeypatch.setattr(type(backend), "put_note", delete_one_and_stop)
        with pytest.raises(KeyboardInterrupt):
            fold(other, 20_000)
        monkeypatch.setattr(type(backend), "put_note", put_note)
        return notes(own, namespace, names)

    monkeypatch.setattr(type(backend), "notes", read_late)
    fold(backend, 20_000)
    assert read_savings(backend)[0].tokens == 60
    fold(backend, 20_000)
    assert len(backend.note_names(STORE)) == 1
    assert read_savings(backend)[0].tokens == 60


def test_read_beside_a_fold_never_counts_less(
    store: Open,
    day: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A counter that falls and rises again would count as growth in Prometheus."""
    backend = store()
    for tokens in (10, 20, 30):
        record(backend, tokens)
    other = store()
    notes = type(backend).notes

    def read_late(
        own: Backend, namespace: bytes, names: Sequence[str]
    ) -> list[bytes | None]:
        monkeypatch.setattr(type(backend), "notes", notes)
        fold(other, 20_000)
        return notes(own, namespace, names)

    monkeypatch.setattr(type(backend), "notes", read_late)
    assert read_savings(backend)[0].tokens == 60


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_fold_killed_between_its_steps_counts_nothing_twice(
    store: Open,
    day: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    deleted: int,
) -> None:
    backend = store()
    for _ in range(3):
        record(backend, 10)
    left = deleted
    put_note = type(backend).put_note

    def kill_at(
        own: Backend, namespace: bytes, name: str, content: bytes | None
    ) -> None:
        nonlocal left
        if content is None:
            if not left:
                raise KeyboardInterrupt
            left -= 1
        put_note(own, namespace, name, content)

    with monkeypatch.context() as patch:
        patch.setattr(type(backend), "put_note", kill_at)
        with pytest.raises(KeyboardInterrupt):
            fold(backend, 20_000)
    assert len(backend.note_names(STORE)) == 4 - deleted
    assert read_savings(backend)[0].tokens == 30
    fold(store(), 20_000)
    assert len(backend.note_names(STORE)) == 1
    assert read_savings(backend)[0].tokens == 30


def test_labels_beyond_the_bounds_are_left_out_and_tokens_count(store: Open) -> None:
    backend = store()
    recorder = SavingsRecorder(backend, ONE)
    for number in range(savings.MOST_LABELS + 50):
        recorder.add(1, {"id": f"{number}"}, 0, 0.0)
    recorder.add(1, {"text": "x" * 100_000}, 0, 0.0)
    recorder.write()
    (total,) = read_savings(backend)
    assert total.tokens == savings.MOST_LABELS + 51
    assert len(total.labels) == savings.MOST_LABELS


def test_damaged_note_is_left_out(store: Open) -> None:
    backend = store()
    record(backend, 10)
    backend.put_note(STORE, f"s20000{'0' * 8}{'1' * 16}", b"junk")
    backend.put_note(STORE, "other", b"of another release")
    assert [total.tokens for total in read_savings(backend)] == [10]


def test_read_only_store_records_nothing(tmp_path: Path) -> None:
    url = f"lmdb://{tmp_path}/store"
    with closing(open_backend(url)):
        pass
    with closing(open_backend(url, read_only=True)) as backend:
        record(backend, 10)
        assert read_savings(backend) == []


def test_recorded_prefill_speed_is_known_to_next_engine_of_local_store(
    tmp_path: Path,
) -> None:
    with closing(open_backend(f"lmdb://{tmp_path}/store")) as backend:
        first = SavingsRecorder(backend, ONE)
        first.add(0, {}, 500, 2.0)
        first.write()
        assert SavingsRecorder(backend, ONE).prefill == (500, 2.0)
        assert SavingsRecorder(backend, TWO).prefill == (0, 0.0)


def test_requests_to_a_shared_medium_do_not_depend_on_the_number_of_loads() -> None:
    blobs = FaultyBlobs(MemoryBlobs())

    def calls_of_notes() -> list[str]:
        return [call for call, subject in blobs.calls if "/notes/" in subject]

    with closing(MemoryBackend(blobs)) as backend:
        recorder = SavingsRecorder(backend, ONE)
        blobs.calls.clear()  # of the opening
        for _ in range(1000):
            recorder.add(100, {"user": "anna"}, 100, 1.0)
        assert calls_of_notes() == []
        recorder.write()
        # the list finds days to fold, once a day
        assert calls_of_notes() == ["put", "list"]
        recorder.add(100, {}, 0, 0.0)
        recorder.write()
        assert calls_of_notes() == ["put", "list", "put"]
