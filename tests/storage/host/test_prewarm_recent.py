"""Contexts that an engine promotes at its start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from persistkv.storage import open_backend
from persistkv.storage.host.prewarm import (
    pending_warm,
    recent_contexts,
    request_warm,
    warm_answers,
)
from persistkv.storage.records import Choice
from tests.tools.contexts import Contexts, chain


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Contexts]:
    with closing(open_backend(f"lmdb://{tmp_path}/store?capacity=16MiB")) as backend:
        writer = Contexts(backend)
        for name in ("old", "middle", "new"):
            writer.add(name, f"{name}1 {name}2 {name}3")
        yield writer


def contexts(writer: Contexts, max_blocks: int, engine: str = "") -> list[list[bytes]]:
    held = {
        key
        for name in ("old", "middle", "new")
        for key in chain([f"{name}{word}" for word in (1, 2, 3)])
    }
    return recent_contexts(
        writer.backend, writer.namespace, held.__contains__, max_blocks, engine
    )


def keys(name: str) -> list[bytes]:
    return chain([f"{name}1", f"{name}2", f"{name}3"])


def test_recent_contexts_puts_requested_before_recently_used(writer: Contexts) -> None:
    assert keys("old") in contexts(writer, 9)
    request_warm(writer.backend, writer.namespace, "old")
    assert contexts(writer, 9) == [keys("old"), *contexts(writer, 9)[1:]]
    assert contexts(writer, 3) == [keys("old")]


def test_recent_contexts_choice_selects_by_id_or_labels(writer: Contexts) -> None:
    writer.add("labelled", "old1 old2", labels={"session": "7", "user": "anna"})
    held = {*keys("old"), *keys("new")}.__contains__

    def chosen(**choice: Any) -> list[list[bytes]]:
        return recent_contexts(
            writer.backend,
            writer.namespace,
            held,
            9,
            only_asked=True,
            choice=Choice(**choice),
        )

    request_warm(writer.backend, writer.namespace, "new")
    assert chosen(request="new") == [keys("new")]
    assert chosen(labels={"session": "7"}) == [keys("old")[:2]]
    assert chosen(labels={"session": "8"}) == chosen(request="nobody") == []
    assert chosen(request="middle") == []  # none of its blocks is held


def test_recent_contexts_acknowledges_blocks_and_missing_counts(
    writer: Contexts,
) -> None:
    first, second = (
        request_warm(writer.backend, writer.namespace, name)
        for name in ("old", "middle")
    )
    assert contexts(writer, 4, "e1") == [keys("old"), keys("middle")[:1]]
    (answer,) = warm_answers(writer.backend, first)
    assert (answer.engine, answer.blocks, answer.missing) == ("e1", 3, 0)
    (answer,) = warm_answers(writer.backend, second)
    assert (answer.blocks, answer.missing) == (1, 2)
    assert pending_warm(writer.backend, writer.namespace, "e1") == []


def test_recent_contexts_unknown_request_is_answered_with_no_blocks(
    writer: Contexts,
) -> None:
    asked = request_warm(writer.backend, writer.namespace, "nobody")
    assert len(contexts(writer, 9, "e1")) == 3
    (answer,) = warm_answers(writer.backend, asked)
    assert (answer.blocks, answer.missing) == (0, 0)
