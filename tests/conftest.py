"""Settings of all tests.

No host process may remain after a test: it outlives its engine, and would outlive the test run.
Hypothesis examples have no deadline, because a busy machine is not a failure. Each run
draws others, so 50 of them suffice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress

import pytest

from persistkv.testing import MemoryBackend
from tests.host_processes import host_processes, mark_run, process_ids

_GRACE_S = 10.0  # an orphaned host process commits the blocks that it accepted

pytest.register_assert_rewrite("persistkv.testing.conformance")
mark_run()
with suppress(ImportError):  # the environment of vLLM's tests lacks it
    import hypothesis

    hypothesis.settings.register_profile("persistkv", max_examples=50, deadline=None)
    hypothesis.settings.load_profile("persistkv")


@pytest.fixture(autouse=True)
def _no_host_process_left() -> Iterator[None]:
    before = process_ids()
    yield
    deadline = time.monotonic() + _GRACE_S
    while left := host_processes(before):
        if time.monotonic() > deadline:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            pytest.fail(f"the test left host processes behind: {sorted(left)}")
        time.sleep(0.01)


@pytest.fixture
def memory_store() -> Iterator[Callable[[], MemoryBackend]]:
    """Return a function that opens new stores in memory; close them after the test."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(closing(MemoryBackend()))
