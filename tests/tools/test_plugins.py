from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
import typer
from typer.testing import CliRunner

from persistkv_tools import plugins
from persistkv_tools.plugins import BrokenCommandError, attach_commands

POINTS = [
    EntryPoint("good", "os:getpid", plugins.ENTRY_POINT_GROUP),
    EntryPoint("broken", "no_such_package:command", plugins.ENTRY_POINT_GROUP),
    EntryPoint("nameless", "os:no_such_function", plugins.ENTRY_POINT_GROUP),
    EntryPoint("ls", "no_such_package:command", plugins.ENTRY_POINT_GROUP),
]


@pytest.fixture
def attached(monkeypatch):
    monkeypatch.setattr(plugins, "entry_points", lambda group: POINTS)

    def attach(*arguments):
        app = typer.Typer()
        app.callback()(lambda: None)
        attach_commands(app, arguments, built_in=["ls"], wrapped=lambda command: command)
        return app

    return attach


def names(app):
    return [command.name for command in app.registered_commands]


def test_help_has_all_of_them(attached):
    assert names(attached("--help")) == ["broken", "good", "nameless"]
    assert names(attached()) == ["broken", "good", "nameless"]


def test_only_the_one_asked_for_is_imported(attached):
    assert names(attached("good", "--fast")) == ["good"]
    assert names(attached("ls", "good")) == []


def test_a_broken_one_says_so_when_it_is_called(attached):
    app = attached("--help")
    assert "does not import" in CliRunner().invoke(app, ["--help"]).stdout
    for name in ("broken", "nameless"):
        outcome = CliRunner().invoke(app, [name])
        assert isinstance(outcome.exception, BrokenCommandError)
