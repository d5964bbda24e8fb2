"""One name has one meaning in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_class_names_of_the_product_have_one_definition_each() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for folder in ("persistkv", "backends", "tools"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    assert len(places) > 500
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice
