"""Comparison of the commands' JSON and exit codes with docs/json.md."""

from __future__ import annotations

import re
from collections.abc import Set
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "list": list,
    "list of integers": list,
    "list of strings": list,
    "any": object,
    "null": type(None),
}
_FREE = (
    "labels",
    "identity",
    "by_problem",
    "requests_sent",
    "children",
    "skipped",
    "load_counts",
)
"""Objects whose field names are data, and the nested nodes of the prefix tree."""


def documented() -> dict[str, dict[str, str]]:
    """Return, for each command that has a heading in docs/json.md, the types of the fields in its
    table."""
    found: dict[str, dict[str, str]] = {}
    commands: list[str] = []
    for line in _page().splitlines():
        if line.startswith("## "):
            commands = re.findall(r"`([a-z-]+)`", line)
        elif commands and line.startswith("| `"):
            names, kind = line.split("|")[1:3]
            for command in commands:
                found.setdefault(command, {}).update(
                    dict.fromkeys(re.findall(r"`([^`]+)`", names), kind.strip())
                )
    return found


def documented_codes() -> set[tuple[str, int]]:
    """Return (command, exit code) of all rows in the tables of exit codes in docs/json.md."""
    found = set()
    findings, _, others = (
        _page().partition("## `ls`")[0].partition("No other command exits with 1")
    )
    for table, code in ((findings, "1"), (others, None)):
        for row in (
            line.split("|") for line in table.splitlines() if line.startswith("| `")
        ):
            found |= {
                (name, int(code or row[3]))
                for name in re.findall(r"`([a-z-]+)`", row[1])
            }
    return found


def check_documented(
    command: str,
    value: object,
    *,
    left_out: Set[str] = frozenset(),
    complete: bool = False,
) -> None:
    """Check that all fields of a command's JSON are documented with their types, and that no
    top-level one is missing.

    :param left_out: documented fields that may be absent.
    :param complete: all documented fields must be present, nested ones included.
    """
    types, found = documented()[command], fields(value)
    for name, inner in found:
        if not any(f"{free}." in name or f"{free}[]." in name for free in _FREE):
            kinds = types[name].split(" or ")
            assert any(isinstance(inner, _TYPES[kind]) for kind in kinds), (
                name,
                inner,
                kinds,
            )
            assert not isinstance(inner, bool) or {"boolean", "any"} & set(kinds), (
                name,
                inner,
            )
    names = {name for name, _ in found}
    needed = {
        name for name in types if complete or ("." not in name and "[" not in name)
    }
    assert needed - names - left_out == set()


def fields(value: object, prefix: str = "") -> list[tuple[str, object]]:
    """Return (name, value) of all fields in a JSON value: ``a.b`` for objects, ``a[].b`` for the
    elements of lists."""
    if isinstance(value, dict):
        return [
            found
            for name, inner in value.items()
            for found in [
                (f"{prefix}{name}", inner),
                *fields(inner, f"{prefix}{name}."),
            ]
        ]
    if isinstance(value, list):
        return [
            found
            for inner in value
            for found in fields(inner, prefix.rstrip(".") + "[].")
        ]
    return []


def _page() -> str:
    return (DOCS / "json.md").read_text()
