"""The simulated medium keeps the contract of ``Blobs``, its faults occur, and the same seed gives
the same history."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress

import pytest

from persistkv.errors import StoreError
from persistkv.storage.blobs import BlobMissingError
from tests.storage.shared.simulation import (
    CALM,
    DAY_S,
    START,
    Faults,
    Hang,
    Process,
    SimulatedBlobs,
    World,
)


def simulated(
    program: Callable[[Process, SimulatedBlobs], None],
    faults: Faults = CALM,
    seed: int = 0,
) -> World:
    """Run a program in one process of a new world until it ends."""
    world = World(seed, faults)
    Process(world, "client", lambda process: program(process, SimulatedBlobs(process)))
    world.run()
    return world


def put_many(process: Process, blobs: SimulatedBlobs) -> None:
    for number in range(60):
        with suppress(StoreError):
            blobs.put(f"p/{number:02}", [b"x", bytes(number)])
        with suppress(StoreError):
            blobs.read(f"p/{number:02}", 0, 1, iter([memoryview(bytearray(1))]))


def test_simulated_medium_without_faults_keeps_the_contract() -> None:
    def program(process: Process, blobs: SimulatedBlobs) -> None:
        written = blobs.put("a/1", [b"first ", memoryview(b"blob")])
        assert START < written <= START + process.world.now
        blobs.put("a/2", [b"second"])
        blobs.put("b/1", [b"other"])
        assert [(info.name, info.size) for info in blobs.list("a/")] == [
            ("a/1", 10),
            ("a/2", 6),
        ]
        assert [info.name for info in blobs.list("", "a/1")] == ["a/2", "b/1"]

        first, second = bytearray(3), bytearray(4)
        assert (
            blobs.read("a/1", 2, 7, iter([memoryview(first), memoryview(second)])) == 7
        )
        assert bytes(first + second) == b"rst blo"
        assert blobs.read("a/2", 4, 5, iter([memoryview(bytearray(5))])) == 2

        blobs.delete(["a/1", "a/none"])
        with pytest.raises(BlobMissingError):
            blobs.read("a/1", 0, 1, iter([memoryview(bytearray(1))]))
        blobs.close()
        with pytest.raises(StoreError, match="closed"):
            blobs.put("a/3", [b""])

    world = simulated(program)
    assert world.requests["client", "PUT"] == 3
    world.end()


@pytest.mark.parametrize("fault", Faults._fields)
def test_simulated_fault_with_probability_occurs(fault: str) -> None:
    world = simulated(put_many, Faults(**{fault: 0.5}))
    calm = simulated(put_many)
    if fault == "slow":
        assert world.now > 10 * calm.now
    else:
        assert len(
            [line for line in world.steps if not line.endswith((": done", ": missing"))]
        ) > (fault != "death")
    assert all(line.endswith(": done") for line in calm.steps)
    world.end()
    calm.end()


def test_simulated_late_write_takes_effect_after_the_death_of_its_process() -> None:
    def program(process: Process, blobs: SimulatedBlobs) -> None:
        with pytest.raises(StoreError):
            blobs.put("a/1", [b"late"])
        process.kill()

    world = World(1, Faults(late=1.0))
    world.draw_late = lambda draw: 600.0
    Process(world, "client", lambda process: program(process, SimulatedBlobs(process)))
    world.run(599.0)
    assert not world.medium.blobs
    world.run(601.0)
    assert world.medium.blobs["a/1"].data == b"late"
    world.end()


def test_simulated_list_is_read_in_two_halves() -> None:
    shown: list[list[str]] = []

    def write(process: Process) -> None:
        blobs = SimulatedBlobs(process)
        for number in range(400):
            blobs.put(f"a/{number:03}", [b""])
            if number % 2:
                blobs.delete([f"a/{number - 1:03}", f"a/{number:03}"])

    def read(process: Process) -> None:
        blobs = SimulatedBlobs(process)
        for _ in range(200):
            shown.append([info.name for info in blobs.list("a/")])

    world = World(0)
    Process(world, "writer", write)
    Process(world, "reader", read)
    world.run()
    # The second of two blobs is written after the first, and both are deleted at once. A snapshot
    # never shows two blobs of different pairs.
    most_pairs = 0
    for names in shown:
        pairs = {int(name[2:]) // 2 for name in names}
        most_pairs = max(most_pairs, len(pairs))
    assert most_pairs > 1
    world.end()


def test_simulated_hang_lets_other_threads_run_and_a_freeze_does_not() -> None:
    ran: list[float] = []

    def program(process: Process, blobs: SimulatedBlobs) -> None:
        def tick() -> None:
            for _ in range(20):
                ran.append(process.world.now)
                process.sleep(100.0)

        process.spawn(tick)
        blobs.put("a/1", [b""])
        assert process.world.now > 500.0
        process.frozen_until = process.world.now + DAY_S
        process.sleep(0.0)

    world = World(0)
    world.hangs.append(Hang("PUT", "a/", 500.0, before=True))
    Process(world, "client", lambda process: program(process, SimulatedBlobs(process)))
    world.run()
    assert [when for when in ran if 500.0 < when < DAY_S] == []
    assert len([when for when in ran if when <= 500.0]) == 6
    assert len(ran) == 20
    world.end()


def test_simulated_lock_is_passed_on_by_a_killed_owner() -> None:
    world = World(0)
    order: list[str] = []

    def program(process: Process) -> None:
        lock = process.lock()

        def hold(name: str, seconds: float) -> None:
            with lock, lock:
                order.append(name)
                process.sleep(seconds)

        process.spawn(lambda: hold("first", 10.0))
        process.spawn(lambda: hold("second", 10.0))
        process.spawn(lambda: hold("third", 10.0))
        process.sleep(15.0)
        process.kill()

    Process(world, "client", program)
    world.run()
    assert order == ["first", "second"]
    world.end()


def test_simulated_world_same_seed_gives_same_steps() -> None:
    faults = Faults(0.02, 0.02, 0.05, 0.05, 0.05, 0.05, 0.02, 0.02, 0.005)
    steps = []
    for _ in range(2):
        world = World(7, faults)
        for number in range(3):
            Process(
                world,
                f"client{number}",
                lambda process: put_many(process, SimulatedBlobs(process)),
            )
        world.run()
        world.end()
        steps.append(world.steps)
    assert steps[0] == steps[1]


@pytest.mark.parametrize("repeats_names", [False, True])
def test_simulated_copy_of_a_machine_goes_on_where_its_original_was(
    monkeypatch: pytest.MonkeyPatch,
    repeats_names: bool,
) -> None:
    monkeypatch.setattr(Process, "repeats_names", repeats_names)
    drawn: defaultdict[str, list[str]] = defaultdict(list)

    def program(process: Process) -> None:
        blobs = SimulatedBlobs(process)
        lock = process.lock()

        def write(prefix: str) -> None:
            for number in range(20):
                with lock:
                    drawn[process.name].append(
                        f"{prefix}/{number}-{process.random.randbytes(8).hex()}"
                    )
                    with suppress(StoreError):
                        blobs.put(drawn[process.name][-1], [b""])
                process.sleep(1.0)

        process.spawn(lambda: write("b"))
        write("a")

    world = World(0)
    original = Process(world, "original", program, is_recorded=True)
    world.run(9.03)
    past = original.past()
    assert past is not None
    before = len(drawn["original"])

    def start_copy() -> None:
        Process(world, "copy", program, original=original, past=past)

    world.at(500.0, start_copy)
    world.run()
    world.end()

    assert 10 < before < 30
    assert drawn["copy"][:before] == drawn["original"][:before]
    of_copy = {name.split("-")[1] for name in drawn["copy"][before:]}
    of_original = {name.split("-")[1] for name in drawn["original"][before:]}
    assert (of_copy == of_original) == repeats_names
    assert of_copy.isdisjoint(of_original) == (not repeats_names)
    written_by_copy = {name[:3] for name in drawn["copy"]}
    written_by_original = {name[:3] for name in drawn["original"]}
    assert written_by_copy == written_by_original
    assert len(drawn["copy"]) == 40
    # two may be sent again
    assert 40 - before <= world.requests["copy", "PUT"] <= 40 - before + 2
