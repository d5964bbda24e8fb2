"""Random histories of engines on one shared store keep its promises (see ``history``), and find
planted bugs.

For the long test, ``PERSISTKV_HISTORIES`` is the number of histories, and
``PERSISTKV_FIRST_HISTORY`` the seed of the first one.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.storage.shared.history import EVENTS, HangKind, History, fail_or_events
from tests.storage.shared.planted import HANGS_FOR, PLANTED

_AT_ONCE = 25  # histories of one job
_MEMORY = Path("/dev/shm")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Return a directory for replicas, in memory where that is possible: histories create hundreds
    of files each."""
    if not os.access(_MEMORY, os.W_OK):
        yield tmp_path
        return
    with TemporaryDirectory(prefix="persistkv-histories-", dir=_MEMORY) as path:
        yield Path(path)


def run_histories(
    directory: Path,
    first: int,
    number: int,
    hangs: Sequence[HangKind] = (),
) -> set[str]:
    """Run histories until one fails; return which ``EVENTS`` occurred."""
    occurred: set[str] = set()
    for seed in range(first, first + number):
        text, events = fail_or_events(seed, directory, hangs)
        if text:
            pytest.fail(text)
        occurred |= events
    return occurred


def test_histories_random_lose_no_acknowledged_pack(disk: Path) -> None:
    assert run_histories(disk, 0, 30) == set(EVENTS)


def test_history_same_seed_gives_same_steps(disk: Path) -> None:
    steps: list[list[str]] = []
    for number in range(2):
        history = History(4, disk / str(number))
        history.run()
        history.end()
        steps.append(history.world.steps)
    assert steps[0] == steps[1]


def _failures(job: tuple[int, int, str]) -> list[str]:
    """Run some histories in a process of its own; return the texts of failures."""
    first, number, directory = job
    texts: list[str] = []
    for seed in range(first, first + number):
        text, _ = fail_or_events(seed, Path(directory))
        texts += [text] * bool(text)
        if seed % 10 == 9:
            gc.collect()
    return texts


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_histories_many_random_lose_no_acknowledged_pack(disk: Path) -> None:
    first = int(os.environ.get("PERSISTKV_FIRST_HISTORY", "1000"))
    number = int(os.environ.get("PERSISTKV_HISTORIES", "200"))
    jobs = [
        (begin, min(_AT_ONCE, first + number - begin), str(disk))
        for begin in range(first, first + number, _AT_ONCE)
    ]
    texts: list[str] = []
    with get_context("spawn").Pool() as pool:
        for found in pool.imap_unordered(_failures, jobs):
            texts += found
            if len(texts) >= 5:
                pool.terminate()
                break
    assert not texts, f"{len(texts)} of {number} histories fail:\n" + "\n\n".join(
        texts[:5]
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("rule", sorted(PLANTED))
def test_histories_find_a_planted_bug(
    disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    rule: str,
) -> None:
    PLANTED[rule](monkeypatch)
    with pytest.raises(pytest.fail.Exception, match="AssertionError"):
        run_histories(disk, 0, 2000, HANGS_FOR.get(rule, ()))
