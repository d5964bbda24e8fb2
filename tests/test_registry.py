"""Classes by name: built-in classes, and plug-ins of installed distributions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError
from persistkv.registry import Registry

Install = Callable[..., None]


class Animal:
    """Base class of the registered classes."""


class Cat(Animal):
    """The built-in class."""


ANIMALS = Registry[Animal]("test.animals", "animal", Animal, {"cat": Cat})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Install a distribution ``zoo`` with entry points of group ``test.animals`` and a broken module."""

    def install(**points: str) -> None:
        info = tmp_path / "zoo-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
        lines = "\n".join(f"{name} = {value}" for name, value in points.items())
        (info / "entry_points.txt").write_text(f"[test.animals]\n{lines}\n")
        (tmp_path / "zoo_broken.py").write_text("1 / 0")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_get_built_in_name_returns_its_class() -> None:
    assert ANIMALS.get("cat") is Cat


@pytest.mark.parametrize("name", ["fish", None, ["cat"]])
def test_get_unknown_name_lists_the_known_ones(install: Install, name: object) -> None:
    install(dog="zoo:Dog")
    with pytest.raises(ConfigurationError, match=r"^animal: .* is not valid; expected one of cat, dog$"):
        ANIMALS.get(name)


def test_get_nothing_registered_names_the_group() -> None:
    with pytest.raises(ConfigurationError, match=r"expected a plug-in of test\.plants$"):
        Registry[Animal]("test.plants", "plant", Animal).get("rose")


def test_get_plug_in_returns_its_class(install: Install) -> None:
    install(ordered="collections:OrderedDict", plain="collections:Counter")
    mappings = Registry[dict[str, int]]("test.animals", "mapping", dict, {"plain": dict})
    assert mappings.names() == ["ordered", "plain"]
    assert mappings.get("ordered") is OrderedDict
    assert mappings.get("plain") is dict, "a plug-in cannot replace a built-in class"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("no_such_module:Dog", r"no_such_module:Dog of zoo raised ModuleNotFoundError: No module named 'no_such"),
        ("persistkv.errors:Nothing", r"persistkv.errors:Nothing of zoo raised AttributeError"),
        ("zoo_broken:Dog", r"zoo_broken:Dog of zoo raised ZeroDivisionError"),
        ("persistkv.errors:StoreError", r"persistkv.errors:StoreError of zoo is no Animal"),
        ("os:getpid", r"os:getpid of zoo is no Animal"),
    ],
)
def test_get_broken_plug_in_names_its_distribution(install: Install, value: str, problem: str) -> None:
    install(dog=value)
    with pytest.raises(ConfigurationError, match=rf"^animal: 'dog' is not valid; expected a plug-in.*; {problem}"):
        ANIMALS.get("dog")
