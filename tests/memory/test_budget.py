"""Defaults of the memory and thread budget of a host process."""

from __future__ import annotations

import os

import pytest

from persistkv.storage.records import StoreOptions


@pytest.mark.parametrize(
    ("cores", "threads"), [(None, 2), (1, 2), (7, 2), (8, 4), (128, 4)]
)
def test_io_threads_default_follows_number_of_cores(
    cores: int | None,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert StoreOptions().io_threads == threads
    assert StoreOptions(io_threads=3).io_threads == 3
