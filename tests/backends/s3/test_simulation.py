"""The simulated server replies like a real one, and the same seed gives the same history."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from persistkv.config import StoreUrl
from persistkv_s3.client.boto import BotoClient
from persistkv_s3.client.transport import ABSENT, Body, Deadline, S3Error, Sink, Transport, WholeSink
from persistkv_s3.options import parse_url
from tests.backends.s3.simulation import CALM, Faults, Process, SimulatedTransport, World
from tests.backends.s3.test_histories import History


def replies(transport: Transport, prefix: str) -> list[object]:
    """Make requests of all kinds; return their results and the names of their errors."""
    found: list[object] = []
    key, other, missing = f"{prefix}b", f"{prefix}a", f"{prefix}missing"

    def note(call: Callable[[], object]) -> None:
        try:
            found.append(call())
        except S3Error as error:
            found.append(type(error).__name__)

    def put(name: str, data: bytes, condition: str | None = None) -> str:
        deadline = Deadline(30)
        return transport.put(name, Body([data], deadline), deadline, condition=condition)

    def get(
        name: str, start: int | None = None, stop: int | None = None, known: str | None = None, length: int = 0
    ) -> bytes | tuple[str, bytes]:
        buffer = bytearray(length)
        sink = Sink([memoryview(buffer)]) if length else WholeSink(100)
        etag = transport.get(name, start, stop, sink, Deadline(30), known=known)
        return bytes(buffer) if length else (etag, bytes(getattr(sink, "data", b"")))

    first = put(key, b"first", ABSENT)
    note(lambda: put(key, b"other", ABSENT))
    note(lambda: get(key))
    second = put(key, b"second", first)
    note(lambda: put(key, b"third", first))
    note(lambda: put(missing, b"x", first))
    note(lambda: get(key, known=second))
    note(lambda: get(key, known=first))
    note(lambda: get(key, 1, 4, length=3))
    note(lambda: get(key, 2, 100, length=98))
    note(lambda: get(missing))
    note(lambda: transport.head(missing, Deadline(30)))
    note(lambda: transport.head(key, Deadline(30))[:2])
    put(other, b"third")
    put(other, b"third, replaced")
    note(lambda: [info[:2] for info in transport.list(prefix, None, Deadline(30)).objects])
    note(lambda: transport.delete([other, missing], Deadline(30)))
    note(lambda: [info[:2] for info in transport.list(prefix, None, Deadline(30)).objects])
    note(lambda: transport.list(f"{prefix}c", None, Deadline(30)))
    return found


def simulated(run: Callable[[Transport], object], faults: Faults = CALM) -> World:
    """Run a program with a client of a new world until it ends."""
    world = World(0, faults, page=3)

    def program(process: Process) -> None:
        run(SimulatedTransport(process))

    Process(world, "client", program)
    world.run()
    return world


def test_simulated_server_replies_match_real_server(endpoint: str, bucket: str) -> None:
    client = BotoClient(*parse_url(StoreUrl.parse(f"s3://{bucket}/store?endpoint_url={endpoint}")))
    expected = replies(client, "store/")
    client.close()
    found: list[object] = []
    simulated(lambda transport: found.extend(replies(transport, "store/")))
    assert found == expected


def test_simulated_list_is_paged_and_requests_are_counted() -> None:
    seen: list[str] = []

    def program(transport: Transport) -> None:
        for number in range(8):
            deadline = Deadline(30)
            transport.put(f"p/{number}", Body([b"x"], deadline), deadline)
        page = transport.list("p/", None, Deadline(30))
        seen.extend(info.key for info in page.objects)
        while page.next is not None:
            page = transport.list("p/", page.next, Deadline(30))
            seen.extend(info.key for info in page.objects)

    world = simulated(program)
    assert seen == [f"p/{number}" for number in range(8)]
    assert world.requests == {("client", "PUT"): 8, ("client", "LIST"): 3}
    assert world.cost("client") == pytest.approx(11 * 0.005 / 1000)


@pytest.mark.parametrize("fault", [name for name in Faults._fields if name not in ("slow", "pause", "death")])
def test_simulated_fault_with_probability_occurs(fault: str) -> None:
    world, calm = simulated(put_many, Faults(**{fault: 0.5})), simulated(put_many)
    assert world.steps is not None
    assert calm.steps is not None
    assert not [line for line in calm.steps if not line.endswith(": done")]
    assert len([line for line in world.steps if not line.endswith(": done")]) > 5


def put_many(transport: Transport) -> None:
    for number in range(40):
        deadline = Deadline(1e9)
        with suppress(S3Error):
            transport.put(f"p/{number}", Body([b"x"], deadline), deadline, condition=ABSENT)


def test_history_same_seed_gives_same_steps(directory: Path) -> None:
    steps = []
    for number in range(2):
        history = History(4, directory / str(number))
        history.run()
        history.world.end()
        steps.append(history.world.steps)
    assert steps[0] == steps[1]
