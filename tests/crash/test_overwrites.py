"""A short run of readers beside a writer that overwrites; ``python -m tests.crash.overwrites`` is a
longer one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.loop import PLACEMENTS
from tests.crash.overwrites import BLOCKS, run


@pytest.mark.slow
@pytest.mark.timeout(170)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_readers_beside_overwriting_writer_get_right_bytes_or_misses(
    tmp_path: Path,
    placement: str,
) -> None:
    (requests, evicted), *readers = run(tmp_path, 6.0, 2, placement)
    assert evicted > BLOCKS
    assert requests > evicted // BLOCKS
    for loaded, missed in readers:
        assert loaded > 0
        assert missed > 0
