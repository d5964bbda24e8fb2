"""Fifty engines that store, delete, merge, write bases and sweep, and are killed in the middle of
calls: nothing that was acknowledged is lost, and nothing else remains.

A storm is for many engines on one index, whose calls interrupt each other, and for nights in which
all machines are suspended. It finds what breaks the rules of merges, bases and sweeps.
The other planted bugs need what only histories have: copies of machines (``names``), commits of
hours (``before``), a list whose halves are ten minutes apart (``once``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.blobs import UnavailableError
from persistkv.storage.shared.index import merge
from persistkv.storage.shared.namespace import SharedNamespace
from persistkv.testing.blobs import METHODS
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of
from tests.storage.shared.planted import PLANTED
from tests.storage.shared.town import NAMESPACE, Engine, Town, pack, town_of

ENGINES = 50
ACTIONS = 400
NIGHTS = 4
"""Number of times that all machines are suspended."""
HOUR_S = 3600.0
STORMS = 6  # one of them finds each planted bug
_MORNING_CALLS = 20  # a sweep makes about as many
_MOST_NESTED = 2  # engines that act in the middle of another one's call


class KilledError(BaseException):
    """The engine was killed in the middle of a call."""


class Storm:
    """Random actions of the engines of one town.

    :param seed: determines everything.
    """

    def __init__(self, town: Town, seed: int) -> None:
        self._town = town
        self._draw = random.Random(seed)
        self._numbers = iter(range(1_000_000))
        self._acting: list[Engine] = []
        """Engines that are in the middle of a call, each interrupted by the following one."""
        self._calls_left: dict[Engine, int] = {}
        """Calls until an engine is killed."""
        self._until_merge = 0
        """Calls until an engine merges the commits of the day before; 0: not planned."""
        self.live: dict[bytes, int] = {}
        """Acknowledged packs that no engine has tried to delete: id → number."""
        self.unknown: set[bytes] = set()
        """Packs that may be there or not: their commit or deletion has failed."""
        self._namespaces: dict[Engine, SharedNamespace] = {}
        """What the engines have opened."""
        for _ in range(ENGINES):
            self._start()

    # Actions

    def run(self) -> None:
        """Do the actions, with pauses of a fifth of a second on average."""
        actions = [self._store] * 12 + [self._delete, self._kill, self._stop]
        actions += [self._base, self._sweep, self._fail_calls, self._fail_merges]
        for number in range(1, ACTIONS + 1):
            engine = self._draw.choice(self._town.engines)
            self._let(self._draw.choice(actions), engine)
            self._pass_time(self._draw.expovariate(5.0))
            while len(self._town.engines) < ENGINES:
                self._start()
            if number % (ACTIONS // NIGHTS) == 0:
                self._sleep_for_a_day()
                self._sweep_in_the_morning()

    def _let(self, act: Callable[[Engine], object], engine: Engine) -> None:
        """Let an engine act; it may be killed meanwhile."""
        self._acting.append(engine)
        try:
            with suppress(StoreError):
                act(engine)
        except KilledError:
            self._town.kill(engine)
        finally:
            self._acting.pop()

    def _store(self, engine: Engine) -> None:
        number = next(self._numbers)
        new = engine.pack(number, blocks=1, block_bytes=16)
        self.unknown.add(new.pack_id)
        engine.store(new)
        self.unknown.discard(new.pack_id)
        self.live[new.pack_id] = number
        # the commit has opened the namespace, if the medium failed at the start of the engine
        self._namespaces[engine] = engine.backend.opened_namespace(NAMESPACE)

    def _delete(self, engine: Engine) -> None:
        held = sorted(engine.held() & self.live.keys())
        if held:
            chosen = self._draw.choice(held)
            del self.live[chosen]
            self.unknown.add(chosen)
            engine.backend.commit(NAMESPACE, CommitBatch(deletions=[chosen]))
            self.unknown.discard(chosen)

    def _kill(self, engine: Engine) -> None:
        self._calls_left[engine] = self._draw.randrange(12)

    def _stop(self, engine: Engine) -> None:
        if engine not in self._acting[:-1]:
            self._town.stop(engine)

    def _base(self, engine: Engine) -> None:
        engine.backend.opened_namespace(NAMESPACE).merger.write_base()

    def _sweep(self, engine: Engine) -> None:
        engine.backend.opened_namespace(NAMESPACE).sweep()

    def _fail_calls(self, engine: Engine) -> None:
        method = self._draw.choice(METHODS)
        is_after = self._draw.random() < 0.5
        error = UnavailableError("no reply")
        engine.blobs.fail(method, error, times=2, after=is_after)

    def _fail_merges(self, engine: Engine) -> None:
        """Let the next object that some engines write to the index not be written."""
        error = UnavailableError("no connection")
        others = self._draw.sample(self._town.engines, 5)
        for other in {engine, *others}:
            other.blobs.fail("put", error, times=1, only=_is_index_object)

    def _sweep_in_the_morning(self) -> None:
        """Let an engine sweep; during one of its first calls, another one merges commits that are a
        day old."""
        self._until_merge = self._draw.randrange(1, _MORNING_CALLS)
        engine = self._draw.choice(self._town.engines)
        self._let(self._sweep, engine)
        self._until_merge = 0

    def _sleep_for_a_day(self) -> None:
        """Suspend all machines: unnamed packs are old enough for a sweep afterwards."""
        self._town.now += 25 * HOUR_S

    def _start(self) -> None:
        engine = self._town.engine(opens=False)
        for method in METHODS:
            engine.blobs.before(method, lambda _: self._interrupt(engine))
            engine.blobs.after(method, lambda _: self._interrupt(engine))
        engine.blobs.split_lists(between=lambda: self._interrupt(engine))
        self._let(self._open, engine)

    def _open(self, engine: Engine) -> None:
        engine.open()
        self._namespaces[engine] = engine.backend.opened_namespace(NAMESPACE)

    def _interrupt(self, engine: Engine) -> None:
        """Kill the engine in the middle of a call, or let another one act meanwhile."""
        left = self._calls_left.get(engine)
        if left is not None:
            self._calls_left[engine] = left - 1
            if not left:
                raise KilledError
        if self._until_merge:
            self._until_merge -= 1
            if not self._until_merge:
                self._let_one_act(self._waiting())
            return
        is_turn = self._draw.random() < 0.01
        if is_turn and len(self._acting) <= _MOST_NESTED:
            self._let_one_act(self._town.engines)

    def _let_one_act(self, engines: Sequence[Engine]) -> None:
        """Let one of the engines do its due work, in the middle of another one's call."""
        if not engines:
            return
        other = self._draw.choice(engines)
        if other not in self._acting:
            self._let(self._step, other)

    def _waiting(self) -> list[Engine]:
        """Return the engines with commits that are not merged."""
        found: list[Engine] = []
        for engine in self._town.engines:
            namespace = self._namespaces.get(engine)
            if namespace is not None and namespace.merger.own_commits:
                found.append(engine)
        return found

    def _pass_time(self, seconds: float) -> None:
        """Let time pass; engines do their due work."""
        end = self._town.now + seconds
        while True:
            due = min(self._town.engines, key=lambda engine: engine.due_at)
            if due.due_at >= end:
                break
            self._town.now = max(self._town.now, due.due_at)
            due.due_at = end  # if its step fails
            self._let(self._step, due)
        self._town.now = max(self._town.now, end)

    def _step(self, engine: Engine) -> None:
        engine.due_at = self._town.now + engine.backend.step()

    # Checks

    def check(self) -> None:
        """Compare the content of the engines, and of a new one, with the acknowledged content."""
        for engine in self._town.engines:
            engine.blobs.clear_faults()
        self._town.run(400)  # idle engines list the index
        assert self._town.names("/inbox/") == []
        fresh = self._town.fresh()
        missing = self.live.keys() - fresh
        assert not missing, f"{len(missing)} of {len(self.live)} packs are lost"
        extra = fresh - self.live.keys() - self.unknown
        assert not extra, f"{len(extra)} packs were deleted, and are there"
        for engine in self._town.engines:
            assert engine.held() == fresh, "an engine differs from a new one"

    def check_blobs(self) -> None:
        """Let all packs become old and one engine sweep; compare the packs on the medium with the
        held ones."""
        self._sleep_for_a_day()
        self._town.run(60)
        engine = self._town.engines[0]
        engine.backend.opened_namespace(NAMESPACE).sweep()
        self.check()
        held = tables(engine.backend, NAMESPACE)
        blobs = self._town.names("/packs/")
        assert len(blobs) == len(held), "blobs of packs are lost, or left"
        for pack_id, number in self.live.items():
            expected = payload_of(pack(number, blocks=1, block_bytes=16))
            assert read_pack(engine.backend, NAMESPACE, held[pack_id]) == expected


@pytest.fixture
def small_bases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let bases have several parts."""
    monkeypatch.setattr(merge, "PART_BYTES", 4000)


def _is_index_object(name: str) -> bool:
    return "/index/" in name


def run_storms(directory: Path, seeds: range, key_env: str | None = None) -> None:
    """Run storms until one fails.

    :param key_env: variable with the key of the stores; None: they have none.
    """
    for seed in seeds:
        with town_of(directory / str(seed), seed) as town:
            town.key_env = key_env
            storm = Storm(town, seed)
            storm.run()
            storm.check()
            storm.check_blobs()


@pytest.mark.usefixtures("small_bases")
def test_storm_of_fifty_engines_loses_nothing(tmp_path: Path) -> None:
    run_storms(tmp_path, range(1))


@pytest.mark.slow
@pytest.mark.usefixtures("small_bases")
def test_storm_of_fifty_engines_with_a_key_loses_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSISTKV_STORM_KEY", "k" * 32)
    run_storms(tmp_path, range(1), "PERSISTKV_STORM_KEY")


@pytest.mark.usefixtures("small_bases")
@pytest.mark.parametrize(
    "rule",
    [
        "included",
        pytest.param("order", marks=pytest.mark.slow),
        pytest.param("unread", marks=pytest.mark.slow),
    ],
)
def test_storm_finds_a_planted_bug(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    PLANTED[rule](monkeypatch)
    with pytest.raises(AssertionError, match=r"are lost|differs"):
        run_storms(tmp_path, range(STORMS))
