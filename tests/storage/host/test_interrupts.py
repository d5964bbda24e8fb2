"""Ctrl-C while a store runs jobs, and the flush and close that follow it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.storage.host.jobs import KINDS
from tests.tools.signals import run_interrupted

STORE_UNTIL_INTERRUPTED = """
from benchmarks.store_rig import Job, fresh_keys

url, kind = sys.argv[1:]
job = Job(64, 16 << 20)
client = job.rig.client(url, kind)
client.open()
interrupt_in(0.5)
try:
    for number in range(100_000):
        job.store(client, number, fresh_keys(64))
except KeyboardInterrupt:
    begin = time.monotonic()
    client.flush(2.0)
    client.close(2.0)
    print(time.monotonic() - begin)
"""


@pytest.mark.parametrize("kind", KINDS)
def test_close_after_interrupt_returns_within_timeout(
    tmp_path: Path,
    kind: str,
) -> None:
    """A job that Ctrl-C interrupted in the caller's stack never ends."""
    seconds = float(
        run_interrupted(
            STORE_UNTIL_INTERRUPTED, f"lmdb://{tmp_path}/store?capacity=1GiB", kind
        )
    )
    assert seconds < 10
