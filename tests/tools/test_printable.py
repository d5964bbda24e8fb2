"""Text from stores and other processes cannot control the terminal or imitate other lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.errors import printable
from persistkv.storage import open_backend
from persistkv.storage.identity import Identity
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import Damage
from tests.tools.terminals import ESCAPES, on_terminal

EVIL = (
    "\x1b[2J\x1b]0;owned\x07\r\n2 "
    "requests\t\x9b31m\x7f\u202egnp.exe\u2066\u200b\u2028\ufeff\u061c\U000e0041"
)
SHOWN = (
    r"\x1b[2J\x1b]0;owned\x07\r\n2 "
    r"requests\t\x9b31m\x7f\u202egnp.exe\u2066\u200b\u2028\ufeff\u061c\U000e0041"
)
COMMANDS = {
    "ls": ("ls", "{url}"),
    "stat": ("stat", "{url}"),
    "show": ("show", "{url}", "bert", "--tree"),
    "top": ("top", "{url}", "--interval", "0.01s"),
    "report": ("report", "{url}", "-o", "{evil}.html"),
    "verify": ("verify", "{url}"),
    "prune": ("prune", "{url}", "--label", "user", "--dry-run"),
    "pin": ("pin", "{url}", "bert"),
    "unpin": ("unpin", "{url}", "bert"),
    "label": ("label", "{url}", "bert", "a={evil}"),
    "why": ("why", "{url}", "--against", "{other}"),
    "doctor": ("doctor", "{url}"),
    "copy": ("copy", "{url}", "{other}"),
}
NAMED = {
    "ls": f"anna{EVIL}",
    "show": f"bert{EVIL}",
    "top": f"e{EVIL}",
    "report": f"{EVIL}.html",
    "verify": f"anna{EVIL}2",
    "prune": f"bert{EVIL}",
    "pin": f"bert{EVIL}",
    "unpin": f"bert{EVIL}",
    "label": EVIL,
    "why": EVIL,
    "copy": f"anna{EVIL}2",
}
"""A part of a string in the JSON of each command that prints such text."""


@pytest.fixture
def store(url: str, tmp_path: Path, run: Run) -> dict[str, str]:
    """URLs of a store full of hostile names, whose second request is damaged, and of a store with
    another identity."""
    with closing(open_backend(url)) as backend:
        writer = Contexts(
            backend, Identity.of({"weights": "w", "config": {EVIL: EVIL}})
        )
        writer.add(f"anna{EVIL}", "s a", labels={"user": EVIL, EVIL: "value"})
        writer.add(f"anna{EVIL}2", "s a b")
        writer.add(f"bert{EVIL}", "s c", labels={"user": EVIL})
        row = make_status(
            f"e{EVIL}", host=EVIL, breaker=EVIL, time=time.time(), interval_s=1e6
        )
        backend.publish_status("e1", row.encode())
    with Damage(url, writer.namespace) as damage:
        damage.flip_keys(f"anna{EVIL}2", 20)
    other = f"lmdb://{tmp_path}/other"
    with closing(open_backend(other)) as backend:
        Contexts(backend, Identity.of({"weights": "w", "config": {EVIL: "other"}})).add(
            "one", "x"
        )
    return {"url": url, "other": other, "evil": EVIL.replace("/", "")}


def is_safe(text: str) -> bool:
    return (
        all(line.isprintable() for line in text.split("\n"))
        and "\n2 requests" not in text
    )


def strings(value: object) -> Iterator[str]:
    """Yield all strings in decoded JSON, names of fields included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value:
            yield from strings(part)
        for part in value.values() if isinstance(value, dict) else ():
            yield from strings(part)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_hostile_text_is_escaped(
    run: Run, store: dict[str, str], name: str
) -> None:
    arguments = [part.format(**store) for part in COMMANDS[name]]
    done = run(*arguments)
    assert done.returncode in (0, 1, 2), done.stderr
    assert done.stdout + done.stderr
    assert is_safe(done.stdout)
    assert is_safe(done.stderr)


@pytest.mark.parametrize("name", COMMANDS)
def test_command_json_hostile_text_is_escaped_and_parses_back(
    run: Run, store: dict[str, str], name: str
) -> None:
    arguments = [part.format(**store) for part in COMMANDS[name]]
    done = run(*arguments, "--json")
    assert done.returncode in (0, 1), done.stderr
    assert is_safe(done.stdout)
    found = list(strings(json.loads(done.stdout)))
    assert name not in NAMED or any(NAMED[name] in text for text in found)
    if name == "ls":
        assert {EVIL, f"anna{EVIL}", f"bert{EVIL}"} <= set(found)


def test_ls_unprintable_characters_are_printed_as_escapes(
    run: Run, store: dict[str, str]
) -> None:
    assert f"user={SHOWN}" in run("ls", store["url"]).stdout


def test_error_hostile_id_is_escaped(run: Run, store: dict[str, str]) -> None:
    done = run("show", store["url"], "anna")
    assert done.returncode == 2
    assert r"anna\x1b[2J" in done.stderr
    assert is_safe(done.stderr)
    assert done.stderr.count("\n") == 1


def test_report_hostile_text_is_escaped(
    run: Run, store: dict[str, str], tmp_path: Path
) -> None:
    assert run("report", store["url"], "-o", "report.html").returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert f"bert{SHOWN}" in page
    assert is_safe(page)


def test_log_hostile_text_is_escaped() -> None:
    """Log lines of drivers quote paths and rows."""
    script = f"""
import logging
from persistkv_tools import cli
try:
    cli.main(["--version"])
except SystemExit:
    logging.getLogger("persistkv_driver").warning("row of %s", {EVIL!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stderr == f"row of {SHOWN}\n"


def test_ls_on_terminal_hostile_text_is_escaped(
    store: dict[str, str], tmp_path: Path
) -> None:
    text, code = on_terminal(200, "ls", store["url"], cwd=tmp_path)
    assert code == 0
    assert is_safe(ESCAPES.sub("", text).replace("\r", ""))
    assert not re.search(r"\x1b\[2J|\x1b\]0", text)


def test_ls_ids_on_terminal_hostile_ids_are_escaped(
    store: dict[str, str], tmp_path: Path
) -> None:
    text, code = on_terminal(200, "ls", store["url"], "--ids", cwd=tmp_path)
    assert code == 0
    assert f"anna{SHOWN}" in text
    assert is_safe(text.replace("\r", ""))


def test_serve_metrics_hostile_text_is_escaped(
    store: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    metrics, code = on_terminal(
        200, "serve-metrics", store["url"], "--once", cwd=tmp_path
    )
    assert code == 0
    assert is_safe(metrics)


def test_printable_safe_text_is_returned_unchanged() -> None:
    for text in ("", "plain text", "naïve 漢字 🙂", "a → b ÷ c", "back\\slash"):
        assert printable(text) is text
