"""Names of stores in the user's configuration file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.conftest import Run


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled: str) -> Path:
    """The configuration file, which names the store ``prod``."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.delenv("PERSISTKV_STORE", raising=False)
    path = tmp_path / "persistkv" / "config.toml"
    path.parent.mkdir()
    path.write_text(f'[stores]\nprod = "{filled}"\n')
    return path


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "prod"),
        ("show", "prod", "engine-0-0"),
        ("pin", "prod", "engine-0-0"),
        ("copy", "prod", "./copy", "engine-0-0"),
        ("why", "prod", "--against", "prod"),
    ],
    ids=" ".join,
)
def test_command_name_of_store_opens_it(
    run: Run,
    config: Path,
    arguments: tuple[str, ...],
) -> None:
    done = run(*arguments)
    assert done.returncode == 0, done.stderr


def test_variable_may_contain_a_name(
    run: Run,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSISTKV_STORE", "prod")
    assert "3 requests" in run("ls").stdout


def test_unknown_name_exits_2_listing_known_ones(run: Run, config: Path) -> None:
    done = run("ls", "prd")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"a name from {config} (known: prod)" in done.stderr


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[stores", "cannot read"),
        ("[stores]\nprod = 5\n", "prod: 5 is not valid"),
        ("stores = 1\n", "a table [stores]"),
    ],
)
def test_invalid_file_exits_2_naming_it(
    run: Run,
    config: Path,
    text: str,
    part: str,
) -> None:
    config.write_text(text)
    done = run("ls", "prod")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert part in done.stderr
    assert str(config) in done.stderr


def test_completion_returns_names_and_requests_of_a_named_store(
    run: Run,
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PERSISTKV_COMPLETE", "1")
    assert run("ls", "pr").stdout.split() == ["prod"]
    assert run("show", "prod", "engine-0").stdout.split() == [
        "engine-0-0",
        "engine-0-1",
    ]
