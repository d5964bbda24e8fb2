from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from persistkv_tools.cli import COMMANDS
from tests.tools.conftest import Run

NOBODY = 65534


def one_line_error(
    done: subprocess.CompletedProcess[str], *parts: str, code: int = 2
) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("persistkv: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


class TestCliErrors:
    def test_url_unknown_scheme_exits_2_listing_known_schemes(self, run: Run) -> None:
        one_line_error(run("ls", "tape:///kv"), "tape", "lmdb")

    def test_url_without_scheme_exits_2(self, run: Run) -> None:
        one_line_error(run("stat", "somewhere"), "scheme://")

    def test_url_negative_capacity_exits_2(self, run: Run, tmp_path: Path) -> None:
        one_line_error(
            run("ls", f"lmdb://{tmp_path}/store?capacity=-1GiB"), "capacity", "-1GiB"
        )

    def test_url_unknown_option_exits_2(self, run: Run, tmp_path: Path) -> None:
        one_line_error(run("ls", f"lmdb://{tmp_path}/store?color=red"), "color")

    def test_stat_absent_store_exits_3_and_creates_nothing(
        self, run: Run, tmp_path: Path
    ) -> None:
        one_line_error(run("stat", f"lmdb://{tmp_path}/absent"), "absent", code=3)
        assert not (tmp_path / "absent").exists()

    def test_ls_file_instead_of_directory_exits_3(
        self, run: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("hello")
        one_line_error(run("ls", f"lmdb://{tmp_path}/file"), "file", code=3)

    def test_ls_garbage_data_mdb_exits_3(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "data.mdb").write_bytes(os.urandom(100_000))
        one_line_error(run("ls", f"lmdb://{tmp_path}/other"), "other", code=3)

    def test_commands_directory_of_other_files_exit_3_and_keep_it(
        self,
        run: Run,
        filled: str,
        tmp_path: Path,
    ) -> None:
        (tmp_path / "home").mkdir()
        (tmp_path / "home" / "notes.txt").touch()
        home, commands = (
            str(tmp_path / "home"),
            (("ls",), ("set", "ttl=7d"), ("verify",), ("prune", "--orphans", "--yes")),
        )
        for command, *options in commands:
            one_line_error(
                run(command, home, *options), "home", "notes.txt", "no store", code=3
            )
        for made in (("copy", filled, home),):
            one_line_error(run(*made), "notes.txt", code=3)
        assert [entry.name for entry in (tmp_path / "home").iterdir()] == ["notes.txt"]

    def test_ls_empty_directory_exits_3(self, run: Run, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        one_line_error(run("ls", f"{tmp_path}/empty"), "empty", "no store", code=3)

    def test_url_relative_path_exits_2_suggesting_absolute_paths(
        self, run: Run, tmp_path: Path
    ) -> None:
        one_line_error(
            run("ls", "lmdb://var/cache/kv"),
            "lmdb:///var/cache/kv",
            f"lmdb://{tmp_path}/var/cache/kv",
        )
        assert not (tmp_path / "var").exists()

    def test_ls_path_without_permission_exits_3(self) -> None:
        """The command runs as an ordinary user, because root can open every path."""
        with tempfile.TemporaryDirectory() as home:
            Path(home).chmod(0o755)
            closed = Path(home, "closed")
            closed.mkdir(0o000)
            done = run_script(AS_ORDINARY_USER, "ls", f"lmdb://{closed}/store")
            closed.chmod(0o700)
        one_line_error(done, "closed", "ermission", code=3)

    @pytest.mark.parametrize(
        "arguments",
        [("ls",), ("no-such-command",), ("ls", "lmdb:///x", "--no-such-option")],
    )
    def test_cli_wrong_usage_exits_2(
        self, run: Run, arguments: tuple[str, ...]
    ) -> None:
        done = run(*arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("prune", "{url}"), "prune requires at least one of --request, --older-than"),
        (
            ("prune", "{url}", "--older-than", "1d"),
            "prune requires --yes or --dry-run: it cannot ask without",
        ),
        (("verify", "{url}", "--repair"), "verify --repair requires --yes"),
        (("set", "{url}", "ttl=7d", "--json"), "set requires --yes or --dry-run"),
        (
            ("label", "{url}", "engine-0-0"),
            "label requires NAME=VALUE or --remove NAME",
        ),
        (
            ("report", "{url}", "-o", "{tmp}/no/page.html"),
            "cannot write {tmp}/no/page.html: No such file or directory",
        ),
        (
            ("why", "{url}", "--against", "{tmp}"),
            "'{tmp}' is not valid; expected a directory with *.safetensors",
        ),
        (
            ("verify", "{url}", "--resume", "{tmp}/here"),
            "cannot read {tmp}/here: it is not a progress file of verify",
        ),
        (("copy", "{url}", "{url}"), "another store than the source"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_command_bad_argument_prints_cause_and_remedy(
    run: Run,
    filled: str,
    tmp_path: Path,
    arguments: tuple[str, ...],
    sentence: str,
) -> None:
    (tmp_path / "here").write_text("mine")
    done = run(*(part.format(url=filled, tmp=tmp_path) for part in arguments))
    one_line_error(done, sentence.format(tmp=tmp_path))


class TestStoreVariable:
    """``PERSISTKV_STORE`` is the default of the store argument of each command, at any position."""

    @pytest.fixture
    def here(
        self, monkeypatch: pytest.MonkeyPatch, filled: str, tmp_path: Path
    ) -> Path:
        monkeypatch.setenv("PERSISTKV_STORE", f"{tmp_path}/store")
        return tmp_path

    @pytest.mark.parametrize(
        "arguments",
        [
            ("ls",),
            ("stat", "--json"),
            ("show", "engine-0-0", "--tree"),
            ("--debug", "show", "--keys", "1", "engine-0-0"),
            ("label", "engine-0-0", "a=/b"),
            ("pin", "engine-0-0"),
            ("set",),
            ("set", "ttl=7d", "--dry-run"),
            ("prune", "--older-than", "1000d", "--dry-run"),
            ("copy", "{here}/copy"),
            ("verify",),
        ],
        ids=lambda arguments: arguments[0],
    )
    def test_command_without_store_uses_variable(
        self, run: Run, here: Path, arguments: tuple[str, ...]
    ) -> None:
        done = run(*(argument.format(here=here) for argument in arguments))
        assert done.returncode == 0, done.stderr

    def test_command_with_store_ignores_variable(self, run: Run, here: Path) -> None:
        one_line_error(run("ls", f"{here}/other"), "other", code=3)
        one_line_error(run("show", f"{here}/other", "engine-0-0"), "other", code=3)

    def test_command_without_store_or_variable_exits_2_naming_variable(
        self,
        run: Run,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.delenv("PERSISTKV_STORE", raising=False)
        one_line_error(run("ls"), "ls requires a store", "PERSISTKV_STORE")
        one_line_error(run("show", "0c4d"), "'0c4d'", "scheme://")

    def test_ls_tilde_or_plain_path_opens_store(
        self,
        run: Run,
        filled: str,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
    ) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        for store in (
            "~/store",
            "lmdb://~/store",
            f"{tmp_path}/store",
            f"{tmp_path}/store?capacity=1GiB",
        ):
            assert "3 requests" in run("ls", store).stdout

    def test_relative_path_opens_store_in_working_directory(
        self,
        run: Run,
        filled: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        assert "3 requests" in run("ls", "./store").stdout
        assert "3 requests" in run("ls", "./store?capacity=1GiB").stdout
        (tmp_path / "below").mkdir()
        monkeypatch.chdir(tmp_path / "below")
        assert "3 requests" in run("ls", "../store").stdout
        assert run("copy", "../store", "./copy").returncode == 0
        assert (tmp_path / "below" / "copy" / "data.mdb").exists()
        monkeypatch.chdir(tmp_path / "store")
        assert "3 requests" in run("ls", ".").stdout

    def test_bare_word_instead_of_store_exits_2_proposing_a_path(
        self, run: Run, filled: str
    ) -> None:
        one_line_error(run("ls", "store"), "'store'", "./")


def test_debug_absent_store_prints_causes(run: Run, tmp_path: Path) -> None:
    for arguments in (
        ("--debug", "ls", f"{tmp_path}/absent"),
        ("ls", f"{tmp_path}/absent", "--debug"),
    ):
        done = run(*arguments)
        assert done.returncode == 3
        assert "FileNotFoundError" in done.stderr
        assert done.stderr.splitlines()[-1].startswith("persistkv: ")
    assert "Traceback" not in run("ls", f"{tmp_path}/absent").stderr


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_short_and_long_option_print_usage(run: Run, option: str) -> None:
    for command in ((), ("show",)):
        done = run(*command, option)
        assert (done.returncode, "usage: persistkv" in done.stdout) == (0, True)


def test_help_breaks_no_paragraph_and_shows_no_type_of_flags(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = run("verify", "--help").stdout
    paragraph = (
        "damage was found, even if it was repaired. Exit code 3: a commit of --repair "
        "failed; earlier commits stay"
    )
    assert paragraph in shown
    for help_text in (shown, run("--help").stdout):
        assert "<bool>" not in help_text


def run_script(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )


# Drop root only when the store is opened: an ordinary user may not be able to read the
# interpreter's files.
AS_ORDINARY_USER = f"""
import os
from persistkv.storage import BACKENDS
from persistkv.storage.inspection import handle
from persistkv_tools import cli
from persistkv_tools.inspect import ls
BACKENDS.get("lmdb")
open_backend = handle.open_backend
def open_as_ordinary_user(url, **how):
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid({NOBODY})
        os.setuid({NOBODY})
    return open_backend(url, **how)
handle.open_backend = open_as_ordinary_user
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


class TestWithoutTransformersExtra:
    @pytest.mark.parametrize("arguments", [("--help",), ("--version",)])
    def test_help_and_version_exit_0(self, arguments: tuple[str]) -> None:
        done = run_script(WITHOUT_THE_EXTRA, *arguments)
        assert done.returncode == 0, done.stderr

    def test_ls_exits_0(self, filled: str) -> None:
        assert run_script(WITHOUT_THE_EXTRA, "ls", filled).returncode == 0


def test_ls_imports_no_torch(start: Run) -> None:
    done = start("ls", "lmdb:///absent", python=("-X", "importtime"))
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "persistkv_tools.cli" in imported
    assert not {"torch", "transformers"} & imported


def test_help_lists_every_command(run: Run) -> None:
    done = run("--help")
    assert all(command in done.stdout for command in COMMANDS)
    assert run("--version").stdout.startswith("persistkv 0.")


def test_command_with_consent_runs_with_closed_stdin(
    run: Run,
    filled: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a service does that has closed its standard streams."""
    monkeypatch.setattr(sys, "stdin", None)
    assert run("prune", filled, "--orphans", "--yes").returncode == 0
    refused = run("prune", filled, "--request", "engine-1")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
