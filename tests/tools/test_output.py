"""Standard output that is full, closed, or a device; and the manual page."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from persistkv_tools.cli import COMMANDS
from tests.tools.conftest import Run
from tests.tools.terminals import TESTED_CODE

FULL = Path("/dev/full")


def run_into(output: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a shell with a redirection of its output, such as ``>/dev/full``."""
    command = [sys.executable, "-m", "persistkv_tools", *arguments]
    script = f'exec "$@" {output}'
    return subprocess.run(
        ["bash", "-c", script, "bash", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **TESTED_CODE},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "{url}"),
        ("ls", "{url}", "--json"),
        ("prune", "{url}", "--older-than", "1s", "--dry-run"),
        ("--completion",),
    ],
    ids=" ".join,
)
def test_command_full_output_exits_3_with_one_line(
    filled: str,
    arguments: tuple[str, ...],
) -> None:
    done = run_into(f">{FULL}", *(part.format(url=filled) for part in arguments))
    assert done.returncode == 3
    expected = "persistkv: the output cannot be written: No space left on device\n"
    assert done.stderr == expected


def test_command_closed_output_runs_without_traceback(filled: str) -> None:
    done = run_into(">&-", "ls", filled)
    assert (done.returncode, done.stderr) == (0, "")


def test_report_to_device_writes_it_and_keeps_it(filled: str, run: Run) -> None:
    before = FULL.stat().st_mode
    done = run("report", filled, "-o", str(FULL))
    assert done.returncode == 2
    assert "cannot write /dev/full: No space left on device" in done.stderr
    assert stat.S_ISCHR(before)
    assert FULL.stat().st_mode == before


def test_manual_page_has_each_command_and_formats_without_warning(
    run: Run,
    tmp_path: Path,
) -> None:
    done = run("--man")
    assert done.returncode == 0
    for name in COMMANDS:
        assert f"\n.SS persistkv {name}".replace("-", r"\-") in done.stdout
    for text in ("PERSISTKV_STORE", "config.toml", "EXIT STATUS"):
        assert text in done.stdout
    if shutil.which("groff") is None:
        pytest.skip("no groff on this machine")
    page = tmp_path / "persistkv.1"
    page.write_text(done.stdout)
    formatted = subprocess.run(
        ["groff", "-k", "-man", "-Tutf8", "-ww", str(page)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert formatted.stderr == ""
