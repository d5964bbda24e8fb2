from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import persistkv.storage.inspection.handle
from persistkv.errors import StoreError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend, CommitBatch, ReadSpan
from persistkv.storage.inspection.selection import Selection
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv_tools.maintain.deletion import Prune, PruneRules
from tests import forked
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts


@pytest.fixture
def family(contexts: tuple[str, Contexts]) -> tuple[str, Contexts]:
    """Four requests and an orphan pack; the pack of anna-1 holds its own block and the prefix of
    anna-2 and bert-1."""
    url, writer = contexts
    writer.add("anna-1", "s1 s2 a1", labels={"user": "anna"}, age_s=40 * 86_400.0)
    writer.add("anna-2", "s1 s2 a1 a2 a3", labels={"user": "anna"}, age_s=3_600.0)
    writer.add("bert-1", "s1 s2 b1", labels={"user": "bert"}, age_s=60.0)
    writer.add("lone-1", "x y z", age_s=50 * 86_400.0)
    writer.add("orphan", "o", manifest=False)
    return url, writer


def requests(run: Run, url: str) -> list[str]:
    return [
        row["id"]
        for row in json.loads(run("ls", url, "--json", "--sort", "id").stdout)[
            "requests"
        ]
    ]


def packs(run: Run, url: str) -> int:
    return int(json.loads(run("stat", url, "--json").stdout)["packs"])


def pruned(run: Run, url: str, *options: str, code: int = 0) -> Any:
    done = run("prune", url, "--json", *options)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def plan(
    backend: Backend, selection: Selection, keep_bytes: int | None = None
) -> Prune:
    """Plan a prune of all namespaces of an open store."""
    wanted = PruneRules(selection, keep_bytes=keep_bytes)
    return Prune(backend, lambda: backend, backend.namespaces(), wanted)


def ids(views: Iterable[dict[str, Any]]) -> list[str]:
    return [view["id"] for view in views]


@pytest.mark.parametrize(
    ("options", "goes"),
    [
        (("--request", "lone"), ["lone-1"]),
        (("--request", "lone-1", "--request", "bert"), ["bert-1", "lone-1"]),
        (("--older-than", "45d"), ["lone-1"]),
        (("--label", "user=bert"), ["bert-1"]),
        (("--label", "user"), ["anna-1", "anna-2", "bert-1"]),
        (("--larger-than", "16KiB"), ["anna-2"]),
        (("--never-hit",), ["anna-2", "bert-1", "lone-1"]),
        (("--namespace", "{namespace}"), ["anna-1", "anna-2", "bert-1", "lone-1"]),
        (("--keep-size", "32KiB"), ["lone-1"]),
        (("--keep-size", "1KiB"), ["anna-1", "anna-2", "bert-1", "lone-1"]),
        (("--keep-size", "1GiB"), []),
        (("--orphans",), []),
    ],
)
def test_prune_selection_deletes_same_requests_as_dry_run(
    run: Run, family: tuple[str, Contexts], options: tuple[str, ...], goes: list[str]
) -> None:
    url, writer = family
    given = [option.format(namespace=writer.namespace.hex()) for option in options]
    before, held = requests(run, url), packs(run, url)
    plan = pruned(run, url, *given, "--dry-run")["plan"]
    assert sorted(ids(plan["requests"])) == goes
    assert (requests(run, url), packs(run, url)) == (before, held)
    done = pruned(run, url, *given, "--yes")["done"]
    assert done["goes"] == plan["goes"]
    assert done["requests"] == len(goes)
    assert requests(run, url) == [name for name in before if name not in goes]
    assert packs(run, url) == held - plan["goes"]["packs"]
    assert run("verify", url).returncode == 0


def test_prune_orphan_pack_is_deleted_only_with_orphans_option(
    run: Run, family: tuple[str, Contexts]
) -> None:
    url, _ = family
    plan = pruned(run, url, "--orphans", "--dry-run")["plan"]
    assert plan["goes"] == {"packs": 1, "blocks": 1, "stored_bytes": 4096}
    assert (
        pruned(run, url, "--label", "user", "--dry-run")["plan"]["goes"]["packs"] == 3
    )


def test_prune_request_with_shared_packs_is_deleted_and_packs_stay(
    run: Run, family: tuple[str, Contexts]
) -> None:
    """Others use the packs of anna-1, and all of its blocks."""
    url, writer = family
    held = packs(run, url)
    found = pruned(run, url, "--request", "anna-1", "--yes")
    assert ids(found["plan"]["requests"]) == ["anna-1"]
    assert found["plan"]["goes"]["packs"] == found["done"]["goes"]["packs"] == 0
    assert found["done"]["requests"] == 1
    assert requests(run, url) == ["anna-2", "bert-1", "lone-1"]
    assert packs(run, url) == held
    assert run("verify", url).returncode == 0
    keys = writer.backend.manifest_keys(writer.namespace, ["anna-1", "bert-1"])
    assert keys[0] is None
    assert keys[1] is not None


def test_prune_label_deletes_rows_whose_packs_another_request_uses(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    writer.add("anna", "a b", labels={"user": "anna"})
    writer.add("bert", "a b", labels={"user": "bert"})
    done = run("prune", url, "--label", "user=anna", "--yes")
    assert done.returncode == 0, done.stderr
    assert "deleted: 1 request, 0 packs" in done.stdout
    assert requests(run, url) == ["bert"]
    assert packs(run, url) == 1


def test_prune_request_whose_packs_are_gone_deletes_it(
    run: Run, tmp_path: Path
) -> None:
    """An operator has deleted the file of its pack, and an engine has noticed it."""
    url = f"file://{tmp_path}/shared?cache=no"
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        writer.add("lost", "a b")
        (file,) = tmp_path.glob("shared/**/packs/*")
        file.unlink()
        buffer = memoryview(bytearray(4096))
        assert backend.read(
            writer.namespace, [ReadSpan(writer.packs["lost"], 0, [buffer])]
        ) == [False]
    assert pruned(run, url, "--request", "lost", "--yes")["done"]["requests"] == 1
    assert requests(run, url) == []


def test_prune_request_with_copies_deletes_all_copies(
    run: Run, family: tuple[str, Contexts]
) -> None:
    url, writer = family
    for number in range(3):
        writer.add(f"copy-{number}", "c1 c2", age_s=float(number))
    writer.add("copy-labelled", "c1 c2", labels={"user": "anna"})
    found = pruned(run, url, "--request", "copy-1", "--yes")
    assert ids(found["plan"]["requests"]) == ["copy-2", "copy-1", "copy-0"]
    assert found["plan"]["goes"]["packs"] == 0, "another row uses the same packs"
    found = pruned(run, url, "--request", "copy-labelled", "--yes")
    assert ids(found["plan"]["requests"]) == ["copy-labelled"]
    assert found["done"]["goes"]["packs"] == 1
    assert len(requests(run, url)) == 4


def test_prune_shared_packs_deletes_every_request_of_pack(
    run: Run, family: tuple[str, Contexts]
) -> None:
    """The pack with the prefix of bert-1 also holds a1, a block that only anna-1 and anna-2 use."""
    url, writer = family
    shown = run("prune", url, "--request", "anna-1", "--request", "anna-2", "--dry-run")
    assert shown.returncode == 1
    assert "to keep: 1 block that only these requests use" in shown.stdout
    options = ("--request", "anna-1", "--request", "anna-2", "--shared-packs", "--yes")
    found = pruned(run, url, *options)
    assert sorted(ids(found["plan"]["requests"])) == ["anna-1", "anna-2", "bert-1"]
    assert found["plan"]["private_blocks_left"] == 0
    assert requests(run, url) == ["lone-1"]
    held = {
        table.pack_id for table in writer.backend.changes(writer.namespace, None).added
    }
    assert held == {writer.packs["lone-1"], writer.packs["orphan"]}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (("--request", "anna-1", "--request", "anna-2"), 1),
        (("--request", "anna-1", "--request", "anna-2", "--older-than", "1m"), 1),
        (("--label", "user=anna"), 1),
        (("--label", "user=anna", "--older-than", "1m"), 0),
        (("--label", "user=anna", "--keep-size", "1KiB"), 0),
        (("--label", "user=anna", "--keep-last", "0"), 0),
        (("--older-than", "50m"), 0),
    ],
)
def test_prune_remaining_block_exits_1_if_selected_by_id_or_label(
    run: Run,
    family: tuple[str, Contexts],
    options: tuple[str, ...],
    code: int,
) -> None:
    """A block that only anna's requests use stays in a pack that bert's request uses. Exit code 1
    is for requests selected by id, or by labels alone; other selections are housekeeping."""
    url, _ = family
    for way in ("--dry-run", "--yes"):
        done = run("prune", url, *options, way)
        assert done.returncode == code
        assert "to keep: 1 block that only these requests use" in done.stdout
    assert "bert-1" in requests(run, url)
    assert "anna-1" not in requests(run, url)


@pytest.mark.parametrize(
    ("options", "stays"),
    [
        (("--keep-last", "2"), ["r0", "r1"]),
        (("--keep-last", "0"), []),
        (("--keep-last", "99"), ["r0", "r1", "r2", "r3", "r4"]),
        (("--keep-daily", "2"), ["r0", "r2"]),
        (("--keep-daily", "9"), ["r0", "r2", "r4"]),
        (("--keep-last", "2", "--keep-daily", "3"), ["r0", "r1", "r2", "r4"]),
        (("--keep-daily", "1", "--label", "user"), ["r0", "r1", "r2", "r4"]),
    ],
    ids=" ".join,
)
def test_prune_keep_last_and_daily_keep_newest_requests(
    run: Run,
    contexts: tuple[str, Contexts],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    stays: list[str],
) -> None:
    """Two requests today, two yesterday, one three days ago."""
    noon = time.mktime((2026, 11, 27, 12, 0, 0, 0, 0, -1))
    monkeypatch.setattr(time, "time", lambda: noon)
    url, writer = contexts
    for number, age_h in enumerate((1, 2, 24, 25, 72)):
        labels = {"user": "anna"} if number in (2, 3) else {}
        age_s = age_h * 3600.0
        writer.add(f"r{number}", f"word{number}", age_s=age_s, labels=labels)
    found = pruned(run, url, *options, "--yes")
    assert requests(run, url) == stays
    assert found["done"]["requests"] == 5 - len(stays)


def test_prune_plan_marks_pinned_requests(
    run: Run, family: tuple[str, Contexts]
) -> None:
    url, _ = family
    unmarked = run("prune", url, "--older-than", "30d", "--dry-run").stdout
    assert "pinned" not in unmarked
    assert run("pin", url, "lone-1").returncode == 0
    shown = run("prune", url, "--older-than", "30d", "--dry-run").stdout
    (row,) = [line for line in shown.splitlines() if "lone-1" in line]
    assert "yes" in row.split()
    assert "of these, 1 request is pinned" in shown
    plan = pruned(run, url, "--older-than", "30d", "--dry-run")["plan"]
    assert [(view["id"], view["pinned"]) for view in plan["requests"]] == [
        ("lone-1", True),
        ("anna-1", False),
    ]


def test_prune_keep_size_prints_returned_and_remaining_bytes(
    run: Run, tmp_path: Path
) -> None:
    url = f"lmdb://{tmp_path}/extents?capacity=256MiB&placement=extents"
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, block_bytes=65_536)
        for number in range(40):
            writer.add(
                f"r{number}",
                " ".join(f"{number}-{word}" for word in range(16)),
                age_s=100.0 - number,
            )
    done = run("prune", url, "--keep-size", "10MiB", "--yes")
    assert done.returncode == 0, done.stderr
    assert "deleted: 30 requests, 30 packs, 30.0 MiB" in done.stdout
    assert "returned to the file system: 3" in done.stdout
    stat = json.loads(run("stat", url, "--json").stdout)
    found = pruned(run, url, "--keep-size", "10MiB", "--yes")
    assert found["disk_bytes"] == stat["disk_bytes"] < 12 << 20
    assert found["free_bytes"] == stat["free"]["catalogue_bytes"]
    assert stat["free"]["payload_bytes"] == 0
    dry = pruned(run, url, "--keep-size", "1MiB", "--dry-run")
    assert (dry["disk_bytes"], dry["free_bytes"]) == (None, None)


def test_prune_keep_size_unreachable_prints_remaining_bytes(
    run: Run, family: tuple[str, Contexts]
) -> None:
    url, _ = family
    done = run("prune", url, "--keep-size", "1KiB", "--yes")
    assert done.returncode == 0
    assert "packs still take 4.0 KiB, more than --keep-size" in done.stdout
    assert "--orphans" in done.stdout


def test_prune_without_consent_or_selection_exits_2(
    run: Run, family: tuple[str, Contexts]
) -> None:
    url, _ = family
    for options in ((), ("--json",)):
        done = run("prune", url, "--older-than", "1h", *options)
        assert done.returncode == 2
        assert "--yes" in done.stderr
    done = run("prune", url, "--yes")
    assert done.returncode == 2
    assert "--older-than" in done.stderr
    assert len(requests(run, url)) == 4


@pytest.mark.parametrize(("answer", "left"), [(b"y\n", 3), (b"n\n", 4), (b"\n", 4)])
def test_prune_on_terminal_deletes_only_after_yes(
    run: Run, family: tuple[str, Contexts], answer: bytes, left: int
) -> None:
    url, _ = family
    ours, theirs = os.openpty()
    os.write(ours, answer)
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "prune",
        url,
        "--request",
        "lone-1",
    ]
    done = forked.run(
        command, stdin=theirs, capture_output=True, text=True, timeout=120
    )
    os.close(ours)
    os.close(theirs)
    assert done.returncode == 0, done.stderr
    assert "to delete: 1 request, 1 pack, 12.0 KiB" in done.stdout
    assert "Delete them? [y/N]" in done.stdout
    assert len(requests(run, url)) == left


def test_prune_namespace_keeps_other_namespaces(run: Run, filled: str) -> None:
    found = json.loads(run("stat", filled, "--json").stdout)["namespaces"]
    first = next(space["id"] for space in found if space["packs"] == 2)
    pruned(run, filled, "--namespace", first[:8], "--orphans", "--yes")
    left = json.loads(run("stat", filled, "--json").stdout)["namespaces"]
    assert [space["packs"] for space in left] == [1]
    assert left[0]["id"] != first, "a namespace ends with its last content"


class TestPruneConcurrentChanges:
    @pytest.fixture
    def store(
        self, memory_store: Callable[[], MemoryBackend]
    ) -> tuple[MemoryBackend, Contexts]:
        backend = memory_store()
        writer = Contexts(backend)
        for number in range(4):
            writer.add(f"r{number}", f"a{number} b{number}")
        return backend, writer

    def test_request_added_after_plan_keeps_its_packs(
        self, store: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = store
        prune = plan(backend, Selection())
        assert prune.plan.goes.packs == 4
        writer.add("new", "a2 b2 c")
        done = prune.run()
        assert done.goes.packs == 3
        assert done.requests == 4
        held = {
            table.pack_id for table in backend.changes(writer.namespace, None).added
        }
        assert held == {writer.packs["r2"], writer.packs["new"]}
        left = backend.catalogue(writer.namespace).manifests()
        assert [manifest.id for manifest in left] == ["new"]

    def test_pack_deleted_after_plan_is_skipped(
        self, store: tuple[MemoryBackend, Contexts]
    ) -> None:
        backend, writer = store
        prune = plan(backend, Selection())
        backend.commit(writer.namespace, CommitBatch(deletions=[writer.packs["r1"]]))
        done = prune.run()
        assert (done.goes.packs, done.requests) == (3, 4)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that makes the commits of a command fail after a number of them."""

    def fail_after(commits: int) -> None:
        def opened(url: str, *, read_only: bool = False) -> FaultyBackend[Backend]:
            backend = FaultyBackend.of(open_backend(url, read_only=read_only))

            def fail(*_: object) -> None:
                if backend.calls.count("commit") > commits:
                    raise StoreError("the disk is gone")

            backend.before("commit", fail)
            return backend

        monkeypatch.setattr(persistkv.storage.inspection.handle, "open_backend", opened)

    return fail_after


def test_prune_failed_commit_lists_earlier_deletions(
    run: Run, url: str, failing: Callable[[int], None]
) -> None:
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend)
        for number in range(100):  # one pack each; one commit deletes 64
            writer.add(f"r{number}", f"a{number}")
    failing(1)
    done = run("prune", url, "--older-than", "1s", "--yes")
    assert (done.returncode, done.stderr) == (3, "persistkv: the disk is gone\n")
    assert "deleted: 64 requests, 64 packs, 256.0 KiB" in done.stdout
    assert len(requests(run, url)) == 36
    found = run("prune", url, "--older-than", "1s", "--yes", "--json")
    assert found.returncode == 0, "one commit is enough for the rest"
    assert json.loads(found.stdout)["done"]["requests"] == 36


def test_pin_protects_request_from_eviction_until_unpin(run: Run, url: str) -> None:
    small = url.replace("1GiB", "2MiB")
    with closing(open_backend(small)) as backend:
        writer = Contexts(backend)
        writer.add("kept", "k1 k2 k3")
    for command, stays in (("pin", True), ("unpin", False)):
        done = run(command, small, "kep", "--json")
        assert json.loads(done.stdout)["pinned"] is stays
        with closing(open_backend(small)) as backend:
            writer = Contexts(backend)
            for number in range(40):
                words = " ".join(f"{command}{number}-{word}" for word in range(30))
                writer.add(f"{command}-{number}", words)
        assert ("kept" in requests(run, small)) is stays
    assert run("pin", small, "gone").returncode == 2
    assert "gone" in run("pin", small, "gone").stderr


def test_pin_prints_pinned_request(run: Run, family: tuple[str, Contexts]) -> None:
    done = run("pin", family[0], "lone")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("pinned lone-1 ")


def test_prune_beside_writer_returns_free_space_to_disk(
    run: Run, tmp_path: Path
) -> None:
    url = f"lmdb://{tmp_path}/extents?capacity=256MiB&placement=extents"
    with closing(open_backend(url)) as backend:
        writer = Contexts(backend, block_bytes=65_536)
        for number in range(40):
            labels = {"user": "anna"} if number % 4 else {}
            writer.add(
                f"r{number}",
                " ".join(f"{number}-{word}" for word in range(16)),
                labels=labels,
            )
        done = run("prune", url, "--label", "user=anna", "--yes", "--json")
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["done"]["requests"] == 30
        assert found["done"]["freed_bytes"] > 10 << 20
        writer.add("more", "x y z")
    assert run("verify", url).returncode == 0


def test_prune_empty_plan_reads_no_catalogue(contexts: tuple[str, Contexts]) -> None:
    _, writer = contexts
    writer.add("one", "a b")
    backend = FaultyBackend.of(writer.backend)
    prune = plan(backend, Selection(made_before=1.0))
    assert prune.plan.requests == []
    assert prune.run().requests == 0
    prune = plan(backend, Selection(), keep_bytes=1 << 30)
    assert prune.plan.goes.packs == 0
    assert "changes" not in backend.calls


def test_prune_pack_evicted_after_plan_is_not_counted(
    contexts: tuple[str, Contexts],
) -> None:
    _, writer = contexts
    writer.add("one", "a b")
    writer.add("two", "c d", labels={"user": "anna"})
    backend = writer.backend
    prune = plan(backend, Selection(labels=(("user", "anna"),)))
    backend.commit(writer.namespace, CommitBatch(deletions=[writer.packs["one"]]))
    done = prune.run()
    assert (done.requests, done.goes.packs) == (1, 1)
