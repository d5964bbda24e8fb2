"""The files, links, make targets, modules and commands that the pages name exist."""

from __future__ import annotations

import posixpath
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from persistkv_tools.cli import COMMANDS

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in (
        "*.md",
        "docs/**/*.md",
        "backends/*/README.md",
        "examples/*/README.md",
    )
    for path in ROOT.glob(pattern)
)
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
REPOSITORY_PATH = re.compile(
    r"`((?:tests|benchmarks|backends|tools|docs|examples|\.ci)/[\w./-]*|persistkv/[\w./-]*(?:/|\.py))`"
)
# after "persistkv" in inputs of digests and derived keys
NO_COMMAND = {"identity", "store", "data", "pack", "record", "names"}


@pytest.fixture(params=PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def page(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


def test_page_links_to_files_exist(page: Path) -> None:
    targets = [
        target.partition("#")[0]
        for target in LINK.findall(FENCE.sub("", page.read_text()))
    ]
    files = [target for target in targets if target and ":" not in target]
    assert [target for target in files if not (page.parent / target).exists()] == []


def test_page_repository_paths_exist(page: Path) -> None:
    assert [
        path
        for path in REPOSITORY_PATH.findall(page.read_text())
        if not (ROOT / path).exists()
    ] == []


def test_page_modules_make_targets_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(
        re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    )
    assert (
        set(re.findall(r"`make ([\w-]+)", text))
        | set(re.findall(r"^make ([\w-]+)", text, re.MULTILINE))
        <= targets
    )
    modules = set(re.findall(r"python -m ((?:benchmarks|tests)[\w.]*)", text))
    assert [module for module in modules if find_spec(module) is None] == []
    fenced = "\n".join(FENCE.findall(text))
    commands = set(
        re.findall(r"^(?:\$ )?persistkv ([a-z][a-z-]*)", fenced, re.MULTILINE)
    )
    commands |= set(re.findall(r"`persistkv ([a-z][a-z-]*)", text))
    assert commands - NO_COMMAND <= COMMANDS.keys()


def test_pages_glob_finds_docs_and_backend_readmes() -> None:
    names = {posixpath.basename(str(path.parent)) + "/" + path.name for path in PAGES}
    assert {
        "docs/getting-started.md",
        "persistkv_lmdb/README.md",
        "sqlite/README.md",
    } <= names
