"""A short run of the crash loop; ``make crash N=200`` runs a longer one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(150)
def test_nothing_acknowledged_is_lost_to_kills() -> None:
    command = [sys.executable, "-m", "tests.crash.loop", "--kills", "15", "--seed", "1", "--seconds", "120"]
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(":")[0] for line in lines] == ["inline", "extents"]
    for line in lines:
        numbers = re.fullmatch(r"\w+: 15 kills, (\d+) packs acknowledged, (\d+) evicted, .*", line)
        assert numbers is not None, line
        assert min(map(int, numbers.groups())) > 50, "the store was not full"
