"""Writers that are stopped for a moment in some of their steps; ``python -m tests.crash.stops``
stops them in each."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.loop import PLACEMENTS
from tests.crash.recorder import find_compiler
from tests.crash.stops import run


@pytest.mark.slow
@pytest.mark.skipif(find_compiler() is None, reason="needs a C compiler")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_stopped_writer_delays_neighbours_for_bounded_time(
    tmp_path: Path,
    placement: str,
) -> None:
    stops, neighbour = run(tmp_path, 1.0, placement, step=4)
    assert stops > 3
    assert neighbour.commits > stops // 2
    assert neighbour.refused > 0, "no writer was stopped while it held the lock"
