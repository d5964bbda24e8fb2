"""The commands on a terminal as users see them, and the output that programs rely on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv_tools.cli import COMMANDS
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import store_with_a_bad_pack
from tests.tools.json_fields import DOCS, documented, documented_codes
from tests.tools.terminals import ESCAPES, on_terminal

LONG_ID = "0c4de6a0b1f24c7e8d9a0b1c2d3e4f50-000017"
LONG_LABEL = (
    "a value that is longer than most, so that it has to be broken somewhere on a "
    "narrow terminal"
)


@pytest.fixture
def terminal(tmp_path: Path) -> Callable[..., tuple[str, int]]:
    """Return a function that runs a command on a terminal of ``width`` columns and returns its text
    and exit code."""

    def run(width: int, *arguments: str, answer: str = "") -> tuple[str, int]:
        shown, code = on_terminal(width, *arguments, cwd=tmp_path, answer=answer)
        return ESCAPES.sub("", shown), code

    return run


@pytest.fixture
def store(url: str) -> str:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, groups=2)
        writer.add(LONG_ID, "s t a b", labels={"user": "anna", "note": LONG_LABEL})
        writer.add("short", "s t a c d")
    return url


SHOWN = [
    ("ls", "{url}"),
    ("stat", "{url}"),
    ("show", "{url}", "0c4d", "--tree"),
    ("verify", "{url}"),
    ("report", "{url}", "-o", "report.html"),
    ("prune", "{url}", "--older-than", "1s", "--dry-run"),
    ("prune", "{url}", "--older-than", "1s"),  # the command asks; the answer is no
    ("label", "{url}", "short", "a=b"),
    ("pin", "{url}", "short"),
    ("unpin", "{url}", "short"),
    ("why", "{url}", "--against", "{url}"),
    ("top", "{url}", "--count", "1", "--interval", "1s"),
    ("doctor", "{url}"),
    ("copy", "{url}", "lmdb://{tmp}/copy"),
    ("copy", "{url}", "lmdb://{tmp}/sealed?key_file={tmp}/key"),
    (
        "rotate-key",
        "lmdb://{tmp}/sealed?key_file={tmp}/key",
        "--new-key-file",
        "{tmp}/new-key",
    ),
    ("forget", "{url}", "anna"),  # the command asks; the answer is no
    ("rebuild", "lmdb://{tmp}/copy"),
    ("set", "{url}", "capacity=2GiB", "ttl=7d", "--yes"),
    ("bench", "lmdb://{tmp}/bench", "--size", "4MiB", "--rounds", "1"),
    ("serve-metrics", "{url}", "--once"),
]
"""Every command, in an order that satisfies the prerequisites of each."""
ASKING = ("prune", "forget")


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 160])
def test_commands_on_terminal_fit_width_and_keep_ids_whole(
    terminal: Callable[..., tuple[str, int]],
    store: str,
    width: int,
    tmp_path: Path,
) -> None:
    (tmp_path / "trace.jsonl").write_text('{"hash_ids": [1, 2]}\n' * 10)
    (tmp_path / "key").write_text("0123456789abcdef" * 4)
    (tmp_path / "new-key").write_text("fedcba9876543210" * 4)
    assert {command[0] for command in SHOWN} == set(COMMANDS)
    for command in SHOWN:
        arguments = [part.format(url=store, tmp=tmp_path) for part in command]
        text, code = terminal(
            width, *arguments, answer="n\n" if command[0] in ASKING else ""
        )
        assert code in (0, 1), (command, text)
        assert "Traceback" not in text
        # lines in Prometheus' format may have any length
        if command[0] != "serve-metrics":
            for line in text.split("\n"):
                assert len(line.rpartition("\r")[2].rstrip()) <= width, (command, line)
        if command[0] == "show":
            assert LONG_ID in text
    assert "…" not in terminal(160, "ls", store)[0]


@pytest.mark.parametrize(("answer", "left"), [("n", 2), ("y", 1)])
def test_verify_repair_on_terminal_deletes_only_after_yes(
    terminal: Callable[..., tuple[str, int]],
    run: Run,
    url: str,
    answer: str,
    left: int,
) -> None:
    store_with_a_bad_pack(url)
    text, code = terminal(80, "verify", url, "--repair", answer=f"{answer}\n")
    assert "Delete 1 bad pack" in text
    assert (
        "to delete: 1 pack, 2 blocks, 8.0 KiB" in text.partition("Delete 1 bad pack")[0]
    ), "the plan, then the question"
    assert code == 1
    assert len(json.loads(run("ls", url, "--json").stdout)["requests"]) == left


def test_doctor_narrow_terminal_breaks_lines_and_cuts_nothing(
    terminal: Callable[..., tuple[str, int]], store: str
) -> None:
    text, _ = terminal(80, "doctor", store)
    rows = [line.split() for line in text.splitlines()]
    assert ["check", "level", "found"] in rows
    assert any(row[:3] == ["package", "persistkv", "ok"] for row in rows)
    assert (
        "engines that name blocks with Python's hash(): otherwise they find nothing after a restart"
        in " ".join(word for row in rows for word in row)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_help_has_example_and_fits_80_columns(
    terminal: Callable[..., tuple[str, int]], name: str
) -> None:
    text, code = terminal(80, name, "--help")
    assert code == 0
    assert f"Example: persistkv {name} " in re.sub(r"\s+", " ", text.replace("│", " "))
    assert "--json" in text
    assert all(len(line) <= 80 for line in text.split("\n"))


@pytest.mark.slow
def test_commands_without_terminal_write_no_colours(start: Run, store: str) -> None:
    for command in SHOWN[:4]:
        done = start(*(part.format(url=store) for part in command))
        assert "\x1b" not in done.stdout + done.stderr


def test_shell_completion_partial_command_returns_its_name(start: Run) -> None:
    asked = start("ver", PERSISTKV_COMPLETE="1")
    assert asked.stdout.split() == ["verify"]


def test_shell_completion_request_id_and_option_return_full_names(
    start: Run, url: str
) -> None:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        for name in ("anna-1", "anna-2", "bert"):
            writer.add(name, f"{name} a")
    # bash breaks words at colons
    scheme, _, place = url.partition("?")[0].partition(":")
    asked = start("show", scheme, ":", place, "an", PERSISTKV_COMPLETE="1")
    assert asked.stdout.split() == ["anna-1", "anna-2"]
    by_variable = start(
        "show", "b", PERSISTKV_COMPLETE="1", PERSISTKV_STORE=url.partition("?")[0]
    )
    assert by_variable.stdout.split() == ["bert"]
    asked = start("verify", "--r", PERSISTKV_COMPLETE="1")
    assert asked.stdout.split() == ["--rate", "--repair", "--resume"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_shell_completion_script_completes_in_bash(tmp_path: Path) -> None:
    program = tmp_path / "persistkv"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m persistkv_tools "$@"\n')
    program.chmod(0o755)
    script = f"""
export PATH={tmp_path}:$PATH
eval "$(persistkv --completion)"
COMP_WORDS=(persistkv ver) COMP_CWORD=1
_persistkv
echo "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["verify"]


def skip_if_extra_is_missing(command: tuple[str, ...]) -> None:
    """Skip a command that needs an extra which is not installed."""
    if command[0] == "serve-metrics":
        pytest.importorskip("prometheus_client")


STORE_COMMANDS = [
    command
    for command in SHOWN
    if command[0] not in ("doctor", "bench", "rebuild", "rotate-key")
]


@pytest.mark.parametrize(
    "command", STORE_COMMANDS, ids=lambda command: " ".join(command[::2])
)
def test_command_bad_url_exits_2_and_absent_store_exits_3(
    run: Run, tmp_path: Path, command: tuple[str, ...]
) -> None:
    skip_if_extra_is_missing(command)
    for url, code in (("tape:///kv", 2), (str(tmp_path / "absent"), 3)):
        done = run(
            *(part.format(url=url, tmp=tmp_path) for part in command),
            *("--yes",) * (command[0] in ASKING),
            "--json",
        )
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (
            code,
            "",
            1,
        ), done.stderr
    assert not (tmp_path / "absent").exists()


def test_help_exit_code_1_matches_documentation(run: Run) -> None:
    listed = {name for name, code in documented_codes() if code == 1}
    named = {
        name
        for name in COMMANDS
        if "code 1" in re.sub(r"[\s│]+", " ", run(name, "--help").stdout)
    }
    assert listed == named


def test_commands_are_all_documented() -> None:
    assert documented().keys() >= set(COMMANDS)
    text = (DOCS / "operating.md").read_text()
    assert all(f"persistkv {name}" in text or f"`{name}" in text for name in COMMANDS)
