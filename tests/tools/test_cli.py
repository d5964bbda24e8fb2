from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.registry import open_backend
from persistkv.testing.samples import sample_manifest

NOBODY = 65534


def one_line_error(done, *parts):
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("persistkv: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


class TestLs:
    def test_lists_requests_while_the_store_is_open_elsewhere(self, run, filled):
        done = run("ls", filled)
        assert done.returncode == 0, done.stderr
        for request in ("engine-0-0", "engine-0-1", "engine-1-0"):
            assert request in done.stdout
        assert "12.0 KiB" in done.stdout
        assert "3 requests in 2 namespaces" in done.stdout
        assert "\x1b" not in done.stdout

    def test_json_is_exact(self, run, filled):
        done = run("ls", filled, "--json")
        found = json.loads(done.stdout)
        assert found["url"] == filled
        assert [len(namespace["requests"]) for namespace in found["namespaces"]] == [2, 1]
        assert found["namespaces"][0]["identity"] == {"architecture": "Llama", "number": 0}
        assert found["namespaces"][0]["requests"][0] == {
            "id": "engine-0-0",
            "created": 1_700_000_000.0,
            "tokens": 48,
            "blocks": 3,
            "group_blocks": [3],
            "raw_bytes": 12288,
            "ordered": True,
            "labels": {},
        }

    def test_labels_are_no_markup(self, run, url):
        with closing(open_backend(url)) as backend:
            namespace = backend.open_namespace(Identity.of({})).id
            labels = {"file": "[bold]x[/nothing]", "who": "me"}
            backend.commit(namespace, CommitBatch(manifests=[sample_manifest("one", labels=labels)]))
        assert "file=[bold]x[/nothing] who=me" in run("ls", url).stdout


class TestStat:
    def test_shows_totals(self, run, filled):
        done = run("stat", filled)
        assert done.returncode == 0, done.stderr
        assert "48.0 KiB" in done.stdout
        assert "1.0 GiB" in done.stdout

    def test_json_is_exact(self, run, filled):
        found = json.loads(run("stat", filled, "--json").stdout)
        assert found["namespaces"] == 2
        assert found["requests"] == 3
        assert found["packs"] == 3
        assert found["blocks"] == 12
        assert found["raw_bytes"] == 12 * 4096
        assert found["codec_ratio"] == 1.0
        assert found["capacity"] == 1 << 30


class TestBadInput:
    def test_an_unknown_scheme_names_the_known_ones(self, run):
        one_line_error(run("ls", "tape:///kv"), "tape", "lmdb")

    def test_what_is_no_url(self, run):
        one_line_error(run("stat", "somewhere"), "scheme://")

    def test_a_negative_capacity(self, run, tmp_path):
        one_line_error(run("ls", f"lmdb://{tmp_path}/store?capacity=-1GiB"), "capacity", "-1GiB")

    def test_an_unknown_option(self, run, tmp_path):
        one_line_error(run("ls", f"lmdb://{tmp_path}/store?color=red"), "color")

    def test_a_store_that_is_not_there(self, run, tmp_path):
        one_line_error(run("stat", f"lmdb://{tmp_path}/absent"), "absent")
        assert not (tmp_path / "absent").exists()

    def test_a_file_where_a_directory_belongs(self, run, tmp_path):
        (tmp_path / "file").write_text("hello")
        one_line_error(run("ls", f"lmdb://{tmp_path}/file"), "file")

    def test_a_directory_with_something_else(self, run, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "data.mdb").write_bytes(os.urandom(100_000))
        one_line_error(run("ls", f"lmdb://{tmp_path}/other"), "other")

    def test_a_path_without_permission(self):
        """Run by an ordinary user: nothing is closed to root."""
        with tempfile.TemporaryDirectory() as home:
            Path(home).chmod(0o755)
            closed = Path(home, "closed")
            closed.mkdir(0o000)
            done = run_script(AS_ORDINARY_USER, "ls", f"lmdb://{closed}/store")
            closed.chmod(0o700)
        one_line_error(done, "closed", "ermission")

    @pytest.mark.parametrize("arguments", [("ls",), ("no-such-command",), ("ls", "lmdb:///x", "--no-such-option")])
    def test_wrong_usage(self, run, arguments):
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr

    @pytest.mark.skipif(find_spec("transformers") is None, reason="the demo needs persistkv[transformers]")
    @pytest.mark.parametrize(
        ("arguments", "part"),
        [
            (("--codec", "brotli"), "codec"),
            (("--tokens", "3"), "tokens"),
            (("--store", "tape:///kv"), "tape"),
            (("--store", "lmdb://{tmp}/file"), "file"),
            (("--store", "lmdb://{tmp}/store?capacity=-5"), "capacity"),
        ],
    )
    def test_the_demo_refuses_before_it_works(self, run, tmp_path, arguments, part):
        (tmp_path / "file").touch()
        one_line_error(run("demo", *(argument.format(tmp=tmp_path) for argument in arguments)), part)
        assert not (tmp_path / ".persistkv-demo" / "model").exists()


def run_script(script, *arguments):
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


# Root is left only where the store is opened: the interpreter's own files may lie where an ordinary user cannot read.
AS_ORDINARY_USER = f"""
import os
from persistkv.storage.registry import backend_class
from persistkv_tools import cli, store_commands
backend_class("lmdb")
open_backend = store_commands.open_backend
def open_as_ordinary_user(url, **options):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
    return open_backend(url, **options)
store_commands.open_backend = open_as_ordinary_user
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


@pytest.mark.parametrize("arguments", [("--help",), ("demo", "--help"), ("ls", "memory://x")])
def test_imports_no_torch(run, arguments):
    done = run(*arguments, python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "persistkv_tools.cli" in imported
    assert not {"torch", "transformers"} & imported


def test_help_names_the_commands(run):
    done = run("--help")
    assert all(command in done.stdout for command in ("ls", "stat", "demo"))
    assert run("--version").stdout.startswith("persistkv 0.")


class TestMove:
    def test_moves_while_the_store_is_open_elsewhere(self, run, filled):
        for placement in ("inline", "extents", "inline"):
            done = run("move", filled, "--to", placement)
            assert done.returncode == 0, done.stderr
            assert f"48.0 KiB moved to {placement}" in done.stdout
        assert "0 B moved" in run("move", filled, "--to", "inline").stdout
        assert json.loads(run("stat", filled, "--json").stdout)["packs"] == 3

    def test_an_unknown_placement_names_the_known_ones(self, run, filled):
        one_line_error(run("move", filled, "--to", "tape"), "tape", "inline, extents")

    def test_a_store_that_is_not_there(self, run, tmp_path):
        one_line_error(run("move", f"lmdb://{tmp_path}/absent", "--to", "inline"), "absent")
        assert not (tmp_path / "absent").exists()
