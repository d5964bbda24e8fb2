"""Contexts that an engine promotes at its start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.host.server.prewarm import recent_contexts
from persistkv.storage.records import Choice
from tests.tools.contexts import Contexts, chain


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Contexts]:
    with closing(open_backend(f"lmdb://{tmp_path}/store?capacity=16MiB")) as backend:
        writer = Contexts(backend)
        for name in ("old", "middle", "new"):
            writer.add(name, f"{name}1 {name}2 {name}3")
        yield writer


def keys(name: str) -> list[bytes]:
    return chain([f"{name}1", f"{name}2", f"{name}3"])


def recent(
    writer: Contexts,
    max_blocks: int,
    *held: str,
    choice: Choice | None = None,
) -> list[list[bytes]]:
    held_keys = {key for name in held for key in keys(name)}
    found = recent_contexts(
        writer.backend, writer.namespace, held_keys.__contains__, max_blocks, choice
    )
    return [list(context.keys) for context in found]


def test_recent_contexts_returns_latest_used_first_up_to_limit(
    writer: Contexts,
) -> None:
    every = ("old", "middle", "new")
    writer.backend.commit(writer.namespace, CommitBatch(touches=[writer.packs["old"]]))
    assert recent(writer, 9, *every) == [keys("old"), keys("new"), keys("middle")]
    assert recent(writer, 4, *every) == [keys("old"), keys("new")[:1]]


def test_recent_contexts_choice_selects_by_id_or_labels(writer: Contexts) -> None:
    writer.add("labelled", "old1 old2", labels={"session": "7", "user": "anna"})

    def chosen(choice: Choice) -> list[list[bytes]]:
        return recent(writer, 9, "old", "new", choice=choice)

    assert chosen(Choice(request="new")) == [keys("new")]
    assert chosen(Choice(labels={"session": "7"})) == [keys("old")[:2]]
    assert chosen(Choice(labels={"session": "8"})) == []
    assert chosen(Choice(request="nobody")) == []
    assert chosen(Choice(request="middle")) == []  # none of its blocks is held
