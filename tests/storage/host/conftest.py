"""Stores with shared rows on both hosts: process and thread."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest

from tests.storage.host.hosted import CONTENT, NUM_ROWS, STRIDE, Hosted
from tests.storage.host.medium import Medium


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    fd = os.memfd_create("rows")
    os.ftruncate(fd, STRIDE * NUM_ROWS)
    memory = mmap.mmap(fd, STRIDE * NUM_ROWS)
    array = np.frombuffer(memory, dtype=np.uint8).reshape(NUM_ROWS, STRIDE)
    array[:] = CONTENT
    everything = Hosted(memory, fd, array)
    yield everything
    for client in everything.clients:
        client.close()
    everything.array = array = np.empty((0, 0), np.uint8)
    memory.close()  # raises BufferError if a host still holds the rows
    os.close(fd)


@pytest.fixture
def medium(monkeypatch: pytest.MonkeyPatch) -> Iterator[Medium]:
    medium = Medium()
    monkeypatch.setattr(
        "persistkv.storage.host.server.event_loop.open_backend",
        lambda url: medium.backend,
    )
    yield medium
    medium.open()
    medium.backend.inner.close()
