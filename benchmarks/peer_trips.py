"""Code of other projects that one job passes through, counted as ``benchmarks.trips`` counts ours.

zarr creates an array of 16 chunks in a local directory and writes it, opens it again, and reads it:
without transactions, without a second process, and without a sync to the disk. httpcore makes one
request to a server of this process, with a new pool of connections, on anyio. Only the functions of
these projects (and of h11, which httpcore uses) count.

Install them for this benchmark: ``pip install zarr httpcore[asyncio]``.
"""

from __future__ import annotations

import importlib
import tempfile
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from benchmarks.rig import show
from benchmarks.trips import Recorder, Trip

_SHAPE = (256, 1024)  # as many blocks as our job has, of 1 KiB
_CHUNKS = (16, 1024)  # 16 chunks: our job of 256 blocks has 16 frames

Step = Callable[[], Any]


class Counter:
    """Counts the steps of one project's job. The first round imports modules and fills caches, and
    is not kept."""

    def __init__(self, projects: tuple[str, ...]) -> None:
        self._recorder = Recorder(projects)
        self.trips: dict[str, Trip] = {}
        """The trip of each step in the last round."""

    def count(self, job: Callable[[Counter], None]) -> dict[str, Trip]:
        """Run the job twice; return the trips of its steps."""
        with self._recorder.installed():
            job(self)
            job(self)
        return self.trips

    def step(self, name: str, run: Step) -> Any:
        """Run one step of the job, and count it."""
        with self._recorder.trip() as trip:
            result = run()
        self.trips[name] = trip
        return result


def _zarr(counter: Counter) -> None:
    zarr = importlib.import_module("zarr")
    content = np.random.default_rng(0).integers(0, 256, _SHAPE, dtype=np.uint8)
    with tempfile.TemporaryDirectory() as directory:
        place = f"{directory}/array.zarr"

        def store() -> None:
            array = zarr.create_array(
                place, shape=_SHAPE, chunks=_CHUNKS, dtype=content.dtype
            )
            array[:] = content

        counter.step("store", store)
        array = counter.step("open", lambda: zarr.open_array(place, mode="r"))
        loaded = counter.step("load", lambda: array[:])
    if not np.array_equal(loaded, content):
        raise RuntimeError("zarr's array differs from the stored one")


class _Hello(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


def _httpcore(counter: Counter) -> None:
    anyio = importlib.import_module("anyio")
    httpcore = importlib.import_module("httpcore")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/"

        async def request() -> bytes:
            async with httpcore.AsyncConnectionPool() as pool:
                response = await pool.request("GET", url)
            return bytes(response.content)

        answer = counter.step("request", lambda: anyio.run(request))
        server.shutdown()
    if answer != b"hello":
        raise RuntimeError(f"httpcore received {answer!r}")


def main() -> None:
    jobs = {
        "zarr": (("zarr",), _zarr),
        "httpcore": (("httpcore", "h11", "anyio"), _httpcore),
    }
    rows = []
    for name, (projects, job) in jobs.items():
        for step, trip in Counter(projects).count(job).items():
            rows.append([name, step, str(len(trip.files)), str(trip.functions)])
    show("One job of other projects", ["project", "step", "files", "functions"], rows)


if __name__ == "__main__":
    main()
