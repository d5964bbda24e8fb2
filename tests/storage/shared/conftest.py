"""Fixture: the handles of one shared store, whose time the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.storage.shared.town import Town, town_of


@pytest.fixture
def town(tmp_path: Path) -> Iterator[Town]:
    with town_of(tmp_path) as town:
        yield town
