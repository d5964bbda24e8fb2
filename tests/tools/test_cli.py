from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from persistkv_tools.cli import COMMANDS

NOBODY = 65534


def one_line_error(done, *parts, code=2):
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("persistkv: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


class TestBadInput:
    def test_an_unknown_scheme_names_the_known_ones(self, start):
        one_line_error(start("ls", "tape:///kv"), "tape", "lmdb")

    def test_what_is_no_url(self, start):
        one_line_error(start("stat", "somewhere"), "scheme://")

    def test_a_negative_capacity(self, start, tmp_path):
        one_line_error(start("ls", f"lmdb://{tmp_path}/store?capacity=-1GiB"), "capacity", "-1GiB")

    def test_an_unknown_option(self, start, tmp_path):
        one_line_error(start("ls", f"lmdb://{tmp_path}/store?color=red"), "color")

    def test_a_store_that_is_not_there(self, start, tmp_path):
        one_line_error(start("stat", f"lmdb://{tmp_path}/absent"), "absent", code=3)
        assert not (tmp_path / "absent").exists()

    def test_a_file_where_a_directory_belongs(self, start, tmp_path):
        (tmp_path / "file").write_text("hello")
        one_line_error(start("ls", f"lmdb://{tmp_path}/file"), "file", code=3)

    def test_a_directory_with_something_else(self, start, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "data.mdb").write_bytes(os.urandom(100_000))
        one_line_error(start("ls", f"lmdb://{tmp_path}/other"), "other", code=3)

    def test_a_path_without_permission(self):
        """The command runs as an ordinary user, because root can open every path."""
        with tempfile.TemporaryDirectory() as home:
            Path(home).chmod(0o755)
            closed = Path(home, "closed")
            closed.mkdir(0o000)
            done = run_script(AS_ORDINARY_USER, "ls", f"lmdb://{closed}/store")
            closed.chmod(0o700)
        one_line_error(done, "closed", "ermission", code=3)

    @pytest.mark.parametrize("arguments", [("ls",), ("no-such-command",), ("ls", "lmdb:///x", "--no-such-option")])
    def test_wrong_usage(self, start, arguments):
        done = start(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr

    @pytest.mark.skipif(find_spec("transformers") is None, reason="the demo needs persistkv[transformers]")
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("--codec", "brotli"), "codec"),
            (("--tokens", "3"), "tokens"),
            (("--store", "tape:///kv"), "tape"),
            (("--store", "lmdb://{tmp}/store?capacity=-5"), "capacity"),
        ],
    )
    def test_the_demo_refuses_before_it_works(self, start, tmp_path, arguments, part):
        (tmp_path / "file").touch()
        one_line_error(start("demo", *(argument.format(tmp=tmp_path) for argument in arguments)), part)
        assert not (tmp_path / ".persistkv-demo" / "model").exists()


def run_script(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# Drop root only when the store is opened: an ordinary user may not be able to read the interpreter's files.
AS_ORDINARY_USER = f"""
import os
from persistkv.storage import BACKENDS
from persistkv_tools import cli, options
BACKENDS.get("lmdb")
open_backend = options.open_inspectable
def open_as_ordinary_user(url, **how):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
    return open_backend(url, **how)
options.open_inspectable = open_as_ordinary_user
cli.main()
"""

WITHOUT_THE_EXTRA = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in ("torch", "transformers", "safetensors") else find(name, path, target)
PathFinder.find_spec = find_spec
from persistkv_tools.cli import main
main()
"""


class TestWithoutTheExtra:
    @pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("--version",)])
    def test_help_works(self, arguments):
        done = run_script(WITHOUT_THE_EXTRA, *arguments)
        assert done.returncode == 0, done.stderr

    def test_a_store_can_be_looked_into(self, filled):
        assert run_script(WITHOUT_THE_EXTRA, "ls", filled).returncode == 0

    def test_the_demo_says_what_to_install(self):
        one_line_error(run_script(WITHOUT_THE_EXTRA, "demo"), "pip install 'persistkv[transformers]'")


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("ls", "lmdb:///absent")])
def test_imports_no_torch(start, arguments):
    done = start(*arguments, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "persistkv_tools.cli" in imported
    assert not {"torch", "transformers"} & imported


def test_help_names_the_commands(start):
    done = start("--help")
    assert all(command in done.stdout for command in COMMANDS)
    assert start("--version").stdout.startswith("persistkv 0.")
