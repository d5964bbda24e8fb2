"""Ctrl-C ends waiting commands at once, regardless of the rest of the wait."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tools.contexts import Contexts
from tests.tools.signals import interrupt, obey_ctrl_c, wait_for_store


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (("top", "{url}", "--interval", "5m"), 130),
        (("verify", "{url}", "--rate", "1KiB"), 130),
        (("copy", "{url}", "lmdb://{tmp}/copy", "--rate", "1KiB"), 130),
        (("bench", "lmdb://{tmp}/bench", "--size", "4MiB", "--rounds", "1000"), 130),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_waiting_command_interrupted_exits_130_at_once(
    contexts: tuple[str, Contexts],
    tmp_path: Path,
    command: tuple[str, ...],
    code: int,
) -> None:
    url, writer = contexts
    writer.add("one", "a b c")
    arguments = [part.format(url=url, tmp=tmp_path) for part in command]
    process = subprocess.Popen(
        [sys.executable, "-m", "persistkv_tools", *arguments],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=obey_ctrl_c,
    )
    wait_for_store(process)
    time.sleep(0.5)  # by then the command waits
    said, took_s = interrupt(process)
    assert (process.returncode, said) == (code, "persistkv: interrupted\n")
    assert took_s < 10
    assert not list(tmp_path.glob("bench*"))
