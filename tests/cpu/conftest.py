"""Fixtures: keys, shared memory and a request."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator

import pytest

from persistkv.base import OffloadKey, ReqContext, make_offload_key
from tests.cpu.devices.driver import driver, driver_library

__all__ = ["driver", "driver_library"]


@pytest.fixture
def context() -> ReqContext:
    return ReqContext("request")


@pytest.fixture
def keys() -> Callable[[int], list[OffloadKey]]:
    """Return a function that makes distinct keys; it never returns the same key twice."""
    numbers = itertools.count()
    return lambda count: [
        make_offload_key(next(numbers).to_bytes(32, "big"), 0) for _ in range(count)
    ]


@pytest.fixture
def shared_memory() -> Iterator[str]:
    """New directory on the tmpfs where regions are placed."""
    directory = tempfile.mkdtemp(prefix="persistkv-test-", dir="/dev/shm")
    yield directory
    shutil.rmtree(directory)
