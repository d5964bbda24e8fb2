"""The tested releases: pyproject.toml, both constraint files, the Makefile and the docs name the
same ones."""

from __future__ import annotations

import re

import pytest

from persistkv.releases import TESTED
from tests.packaging.constraints import ROOT, lower_bounds, pins

SEPARATE = {"torch", "vllm"}
"""Packages of one pinned build, or with tests of their own."""


def minor(release: str, like: str) -> str:
    """Return a release with as many numbers as ``like`` has."""
    return ".".join(release.split(".")[: like.count(".") + 1])


def test_oldest_constraints_are_the_lower_bounds_of_pyproject() -> None:
    pinned = pins("oldest")
    bounds = {name: bound for name, bound in lower_bounds().items() if name != "torch"}
    found = {name: minor(pinned[name], bound) for name, bound in bounds.items()}
    assert found == bounds, "run `make update-constraints`"


@pytest.mark.parametrize("name", sorted(TESTED.keys() - SEPARATE))
def test_tested_range_is_that_of_the_constraints(name: str) -> None:
    tested = TESTED[name]
    assert tested.oldest == minor(pins("oldest")[name], tested.oldest)
    assert tested.newest == minor(pins("dev")[name], tested.newest)
    assert tested.covers(pins("oldest")[name])
    assert tested.covers(pins("dev")[name])


def test_tested_packages_are_all_dependencies_of_users() -> None:
    assert TESTED.keys() - {"vllm"} == lower_bounds().keys()


def test_tested_torch_and_vllm_are_those_of_the_constraints_and_the_makefile() -> None:
    makefile = dict(
        re.findall(
            r"^(VLLM\w*) \?= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE
        )
    )
    assert TESTED["torch"].covers(pins("dev")["torch"])
    assert pins("dev")["torch"] == pins("oldest")["torch"]
    assert TESTED["vllm"].covers(makefile["VLLM"])
    assert TESTED["vllm"].covers(makefile["VLLM_OLDER"])
    assert not TESTED["vllm"].covers(makefile["VLLM_NEXT"])


def test_docs_table_has_the_tested_ranges() -> None:
    rows = re.findall(
        r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \|",
        (ROOT / "docs/releases.md").read_text(),
        re.MULTILINE,
    )
    assert {name: (oldest, newest) for name, oldest, newest in rows} == dict(TESTED)


@pytest.mark.parametrize(
    ("release", "covered"),
    [
        ("5.5.0", True),
        ("5.10.2", True),
        ("5.24.0", True),
        ("5.24.7", True),
        ("5.24.0+local", True),
        ("5.4.9", False),
        ("4.57.1", False),
        ("5.25.0", False),
        ("6.0.0rc1", False),
    ],
)
def test_tested_covers_releases_from_oldest_to_fixes_of_newest(
    release: str,
    covered: bool,
) -> None:
    assert TESTED["transformers"].covers(release) is covered
