"""A short run of the kills; ``python -m tests.integrations.lmcache.kills --kills 100`` is a longer
one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(170)
def test_killed_processes_leave_exact_usage_within_the_capacity(tmp_path: Path) -> None:
    """In a process without threads, because it forks."""
    paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    command = [sys.executable, "-m", "tests.integrations.lmcache.kills"]
    done = subprocess.run(
        [*command, "--kills", "4", "--directory", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    found = re.search(r"(\d+) of (\d+) objects are held", lines[-1])
    assert found is not None, lines
    # the capacity was tested
    held, stored = map(int, found.groups())
    assert 0 < held < stored / 2, lines
