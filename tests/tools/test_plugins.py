from __future__ import annotations

import importlib.metadata
import sys
from importlib.metadata import EntryPoint
from types import ModuleType

import click
import pytest

from persistkv_tools import plugins
from persistkv_tools.plugins import BrokenCommandError

GROUP = plugins.ENTRY_POINT_GROUP
POINTS = [
    EntryPoint("good", "somebodys_commands:good", GROUP),
    EntryPoint("function", "os:getpid", GROUP),
    EntryPoint("broken", "no_such_package:command", GROUP),
    EntryPoint("nameless", "os:no_such_function", GROUP),
    EntryPoint("ls", "no_such_package:command", GROUP),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    @click.command(help="Does good.")
    def good():
        click.echo("done")

    module = ModuleType("somebodys_commands")
    module.good = good
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: POINTS if group == GROUP else [])


def test_help_has_all_of_them(run):
    shown = run("--help").stdout
    assert "Does good." in shown
    assert shown.count("does not import") == 2
    assert "is no click.Command" in shown
    assert plugins.names(["ls"]) == ["broken", "function", "good", "nameless"]


def test_one_runs(run):
    done = run("good")
    assert (done.returncode, done.stdout) == (0, "done\n")


def test_none_takes_the_place_of_ours(run):
    assert "List the requests" in run("ls", "--help").stdout


@pytest.mark.parametrize("name", ["broken", "nameless", "function"])
def test_a_broken_one_says_so_when_it_is_called(run, name):
    done = run(name)
    assert done.returncode == 2
    assert f"persistkv: the command {name} (" in done.stderr
    with pytest.raises(BrokenCommandError):
        plugins.load(name).callback()


def test_none_that_is_not_there():
    assert plugins.load("nobody") is None
