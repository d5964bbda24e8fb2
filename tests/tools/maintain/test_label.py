from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.inspection.labels import relabel
from persistkv.storage.inspection.requests import NotFoundError, find_request
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.samples import sample_pack
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts


def labels(run: Run, url: str) -> dict[str, dict[str, str]]:
    return {
        request["id"]: request["labels"]
        for request in json.loads(run("ls", url, "--json").stdout)["requests"]
    }


@pytest.fixture
def store(contexts: tuple[str, Contexts]) -> str:
    url, writer = contexts
    writer.add("one", "a b c", labels={"user": "anna", "draft": "yes"})
    writer.add("two", "a b d")
    return url


def test_label_adds_changes_and_removes_labels(run: Run, store: str) -> None:
    done = run(
        "label",
        store,
        "one",
        "user=bert",
        "project=moon shot",
        "empty=",
        "--remove",
        "draft",
    )
    assert done.returncode == 0, done.stderr
    assert "project=moon shot" in done.stdout
    assert labels(run, store) == {
        "one": {"user": "bert", "project": "moon shot", "empty": ""},
        "two": {},
    }
    found = json.loads(run("label", store, "one", "--remove", "user", "--json").stdout)
    (changed,) = found["requests"]
    assert (changed["id"], changed["labels"]) == (
        "one",
        {"project": "moon shot", "empty": ""},
    )
    assert (
        json.loads(run("ls", store, "--label", "project", "--json").stdout)["matched"]
        == 1
    )


def test_label_keeps_all_other_fields(run: Run, store: str) -> None:
    run("pin", store, "one")
    before = json.loads(run("show", store, "one", "--json").stdout)
    assert run("label", store, "one", "user=bert").returncode == 0
    after = json.loads(run("show", store, "one", "--json").stdout)
    # the manifest is written again, so hits are counted from now on
    for name in ("labels", "last_used", "hits"):
        before["context"]["request"].pop(name)
        after["context"]["request"].pop(name)
    assert before["context"]["request"]["reused"]
    assert after == before
    assert run("verify", store).returncode == 0


def test_relabel_pinned_request_stays_pinned(tmp_path: Path) -> None:
    """A pinned request remains although other requests fill the store."""
    with closing(open_backend(f"lmdb://{tmp_path}/small?capacity=4MiB")) as backend:
        writer = Contexts(backend, block_bytes=64 << 10)
        writer.add("kept", "a b c")
        backend.commit(writer.namespace, CommitBatch(pins=[("kept", True)]))
        relabel(backend, find_request(backend, "kept"), {"user": "anna"}, [])
        for number in range(30):
            writer.add(f"r{number}", f"{number}-a {number}-b {number}-c")
        held = {
            manifest.id: manifest.labels
            for manifest in backend.catalogue(writer.namespace).manifests()
        }
    assert held["kept"] == {"user": "anna"}
    assert len(held) < 31


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "NAME=VALUE or --remove"),
        (("user",), "NAME=VALUE"),
        (("=anna",), "NAME=VALUE"),
        (("user=a", "user=b"), "each name once"),
        (("user=a", "--remove", "user"), "the same command does not set"),
    ],
)
def test_label_bad_arguments_exit_2(
    run: Run, store: str, arguments: tuple[str, ...], part: str
) -> None:
    done = run("label", store, "one", *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert part in done.stderr


def test_label_unknown_request_exits_2(run: Run, store: str) -> None:
    assert run("label", store, "nobody", "a=b").returncode == 2


def with_second_writer(
    backend: MemoryBackend, seeds: list[int]
) -> FaultyBackend[MemoryBackend]:
    """Return the store with a second writer that commits before each commit with a cursor until
    ``seeds`` is empty."""

    def write(namespace: bytes, batch: CommitBatch) -> None:
        if batch.seen is not None and seeds:
            backend.commit(
                namespace, CommitBatch([sample_pack(namespace, seeds.pop())])
            )

    busy = FaultyBackend.of(backend)
    busy.before("commit", write)
    return busy


class TestRelabelConcurrentCommits:
    @pytest.fixture
    def memory(self, memory_store: Callable[[], MemoryBackend]) -> MemoryBackend:
        backend = memory_store()
        Contexts(backend).add("one", "a b c")
        return backend

    def test_commit_between_read_and_write_retries(self, memory: MemoryBackend) -> None:
        seeds = [1, 2, 3]
        busy = with_second_writer(memory, seeds)
        assert relabel(busy, find_request(busy, "one"), {"a": "b"}, []) == {"a": "b"}
        assert seeds == []

    def test_commit_before_every_attempt_raises_store_error(
        self, memory: MemoryBackend
    ) -> None:
        busy = with_second_writer(memory, list(range(1_000)))
        with pytest.raises(StoreError, match="other processes wrote"):
            relabel(busy, find_request(busy, "one"), {"a": "b"}, [])

    def test_deleted_request_raises_not_found_and_is_not_recreated(
        self, memory: MemoryBackend
    ) -> None:
        found = find_request(memory, "one")
        (pack,) = memory.changes(found.namespace.id, None).added
        memory.commit(found.namespace.id, CommitBatch(deletions=[pack.pack_id]))
        with pytest.raises(NotFoundError):
            relabel(memory, found, {"a": "b"}, [])
        assert list(memory.catalogue(found.namespace.id).manifests()) == []


def pinned(run: Run, url: str) -> set[str]:
    rows = json.loads(run("ls", url, "--json").stdout)["requests"]
    return {row["id"] for row in rows if row["pinned"]}


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        (("one",), ("one",)),
        (("one", "two"), ("one", "two")),
        (("--label", "user=anna"), ("one",)),
        (("--label", "team"), ("one", "two")),
    ],
    ids=" ".join,
)
def test_pin_unpin_and_label_accept_several_ids_or_a_label(
    run: Run, store: str, chosen: tuple[str, ...], names: tuple[str, ...]
) -> None:
    assert run("label", store, "one", "two", "team=a").returncode == 0
    found = json.loads(run("pin", store, *chosen, "--json").stdout)
    assert {row["id"] for row in found["requests"]} == set(names)
    assert pinned(run, store) == set(names)
    done = run("label", store, *chosen, "kept=yes", "--remove", "draft")
    assert done.returncode == 0, done.stderr
    marked = {name for name, of in labels(run, store).items() if "kept" in of}
    assert marked == set(names)
    done = run("unpin", store, *chosen)
    assert done.stdout.count("unpinned") == len(names)
    assert pinned(run, store) == set()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("pin", "{store}"), "pin requires either REQUEST ... or --label"),
        (("unpin", "{store}", "one", "--label", "user"), "unpin requires either"),
        (("pin", "{store}", "--label", "user=nobody"), "no request has the labels"),
        (("pin", "{store}", "one", "absent"), "'absent'"),
        (("label", "{store}", "team=a"), "label requires either"),
        (("label", "{store}", "one", "a=" + 100_000 * "x"), "at most 4,096 characters"),
        (("label", "{store}", "one", "=x"), "NAME=VALUE"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value)[:40],
)
def test_pin_and_label_wrong_choice_exits_2_and_changes_nothing(
    run: Run,
    store: str,
    arguments: tuple[str, ...],
    part: str,
) -> None:
    before = labels(run, store)
    done = run(*(word.format(store=store) for word in arguments))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert part in done.stderr
    assert len(done.stderr) < 300
    assert (labels(run, store), pinned(run, store)) == (before, set())


def test_ls_cuts_long_labels_that_an_engine_stored(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    writer.add("one", "a b", labels={"note": "x" * 100_000})
    assert len(run("ls", url).stdout) < 5_000
    (row,) = json.loads(run("ls", url, "--json").stdout)["requests"]
    assert len(row["labels"]["note"]) == 100_000
