from __future__ import annotations

import json
import time
from contextlib import closing

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.samples import sample_manifest
from persistkv_tools.inspect.ls import Sort, list_requests
from persistkv_tools.options import Selection
from tests.tools.contexts import Contexts


def test_lists_requests_while_the_store_is_open_elsewhere(start, filled):
    done = start("ls", filled)
    assert done.returncode == 0, done.stderr
    for request in ("engine-0-0", "engine-0-1", "engine-1-0"):
        assert request in done.stdout
    assert "12.0 KiB" in done.stdout
    assert "3 requests in 2 namespaces" in done.stdout
    assert "\x1b" not in done.stdout


def test_json_is_exact(run, filled):
    found = json.loads(run("ls", filled, "--json").stdout)
    assert found["url"] == filled
    assert (found["total"], found["matched"], found["offset"]) == (3, 3, 0)
    assert [space["identity"]["number"] for space in found["namespaces"]] == [0, 1]
    assert abs(found["requests"][-1].pop("last_used") - time.time()) < 300
    assert found["requests"][-1] == {
        "id": "engine-0-0",
        "namespace": Identity.of({"architecture": "Llama", "number": 0}).digest.hex(),
        "created": 1_700_000_000.0,
        "tokens": 48,
        "blocks": 3,
        "group_blocks": [3],
        "raw_bytes": 12288,
        "ordered": True,
        "labels": {},
        "reused": False,
        "shared_by": 0,
        "pinned": False,
        "hits": 0,
        "stored_bytes": None,
    }


class TestUse:
    @pytest.fixture
    def used(self, contexts):
        url, writer = contexts
        writer.add("short", "a b")
        writer.add("lone", "x y")
        writer.add("long", "a b c")
        writer.backend.commit(writer.namespace, CommitBatch(pins=[("lone", True)]))
        return url

    def test_it_is_told(self, run, used):
        found = {request["id"]: request for request in json.loads(run("ls", used, "--json").stdout)["requests"]}
        told = {name: (view["reused"], view["shared_by"], view["pinned"]) for name, view in found.items()}
        assert told == {"short": (True, 1, False), "lone": (False, 0, True), "long": (False, 0, False)}
        assert {name: view["hits"] for name, view in found.items()} == {"short": 1, "lone": 0, "long": 0}
        assert {name: view["stored_bytes"] for name, view in found.items()} == {
            "short": 8192,
            "lone": 8192,
            "long": 12288,
        }
        rows = {line.split()[0]: line.split()[-2:] for line in run("ls", used).stdout.splitlines() if line.split()}
        assert (rows["short"][-1], rows["lone"]) == ("1", ["0", "yes"])
        by_hits = json.loads(run("ls", used, "--sort", "hits", "--json").stdout)["requests"]
        assert by_hits[0]["id"] == "short"

    def test_hits_are_those_of_later_requests_that_are_held(self, run, contexts):
        url, writer = contexts
        for name, text in (("short", "a b"), ("same", "a b"), ("long", "a b c"), ("longer", "a b c d")):
            writer.add(name, text)
        found = {request["id"]: request for request in json.loads(run("ls", url, "--json").stdout)["requests"]}
        assert {name: view["hits"] for name, view in found.items()} == {"short": 3, "same": 2, "long": 1, "longer": 0}
        assert {name: view["shared_by"] for name, view in found.items()} == {
            "short": 3,
            "same": 3,
            "long": 1,
            "longer": 0,
        }

    def test_never_hit(self, run, used):
        found = json.loads(run("ls", used, "--never-hit", "--json").stdout)
        assert {request["id"] for request in found["requests"]} == {"lone", "long"}
        assert (found["matched"], found["total"]) == (2, 3)

    def test_sorted_by_it(self, contexts, monkeypatch, run):
        url, writer = contexts
        clock = time.time()
        for number, name in enumerate(("a", "b", "c")):
            monkeypatch.setattr(time, "time", lambda number=number: clock + 100 * number)
            writer.add(name, f"{name} {name}{name}")
        writer.add("d", "a aa dd")  # uses the blocks of "a" again
        found = json.loads(run("ls", url, "--sort", "used", "--json").stdout)["requests"]
        used = [request["last_used"] for request in found]
        assert used == sorted(used, reverse=True)
        assert found[-1]["id"] == "b"

    def test_a_store_that_does_not_tell(self):
        backend = FaultyBackend.of(MemoryBackend())
        backend.after("uses", lambda uses, namespace, manifest_ids: [None for _ in uses])
        Contexts(backend).add("one", "a b")
        (view,) = list_requests("", backend, Selection(), sort=Sort.USED).requests
        assert (view.last_used, view.reused, view.shared_by, view.pinned) == (None, None, None, None)
        assert list_requests("", backend, Selection(never_hit=True)).matched == 0


def test_labels_are_no_markup(run, url):
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({})).id
        labels = {"file": "[bold]x[/nothing]", "who": "me"}
        backend.commit(namespace, CommitBatch(manifests=[sample_manifest("one", labels=labels)]))
    assert "file=[bold]x[/nothing] who=me" in run("ls", url).stdout


def test_a_page_says_where_the_next_one_begins(run, contexts):
    url, writer = contexts
    for number in range(60):
        writer.add(f"r{number:02d}", f"a b{number}", age_s=100.0 + number)
    first = run("ls", url)
    assert "r49" in first.stdout
    assert "r50" not in first.stdout
    assert "1 to 50 of 60; --offset 50" in first.stdout
    rest = run("ls", url, "--offset", "50").stdout
    assert "r50" in rest
    assert "51 to 60 of 60" in rest
    assert len(json.loads(run("ls", url, "--json").stdout)["requests"]) == 60
    assert len(json.loads(run("ls", url, "--json", "--limit", "7").stdout)["requests"]) == 7
    everything = run("ls", url, "--limit", "0").stdout
    assert all(f"r{number:02d}" in everything for number in range(60))


@pytest.fixture
def three(contexts):
    url, writer = contexts
    writer.add("b", "a b c", labels={"user": "anna"}, age_s=30.0)
    writer.add("a", "a", labels={"user": "bert", "app": "chat"}, age_s=7_200.0)
    writer.add("c", "a b", age_s=3 * 86_400.0)
    return url, writer


ORDERS = {  # TestUse covers the order by last use
    Sort.CREATED: ["b", "a", "c"],
    Sort.TOKENS: ["b", "c", "a"],
    Sort.BLOCKS: ["b", "c", "a"],
    Sort.SIZE: ["b", "c", "a"],
    Sort.ID: ["a", "b", "c"],
    Sort.NAMESPACE: ["b", "a", "c"],
}


@pytest.mark.parametrize("sort", ORDERS)
def test_every_order(run, three, sort):
    url, _ = three
    for limit in ((), ("--limit", "3")):
        rows = json.loads(run("ls", url, "--json", "--sort", sort.value, *limit).stdout)["requests"]
        assert [row["id"] for row in rows] == ORDERS[sort]
        rows = json.loads(run("ls", url, "--json", "--sort", sort.value, "--reverse", *limit).stdout)["requests"]
        assert [row["id"] for row in rows] == ORDERS[sort][::-1]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--label", "user"), "ab"),
        (("--label", "user=anna"), "b"),
        (("--label", "user=bert", "--label", "app"), "a"),
        (("--label", "user=anna", "--label", "app"), ""),
        (("--older-than", "1h"), "ac"),
        (("--newer-than", "1d"), "ab"),
        (("--older-than", "1h", "--newer-than", "1d"), "a"),
        (("--larger-than", "4KiB"), "bc"),
        (("--smaller-than", "9000"), "ac"),
    ],
)
def test_every_filter(run, three, options, expected):
    found = json.loads(run("ls", three[0], "--json", "--sort", "id", *options).stdout)
    assert "".join(row["id"] for row in found["requests"]) == expected
    assert (found["matched"], found["total"]) == (len(expected), 3)


def test_one_namespace(run, filled):
    wanted = Identity.of({"architecture": "Llama", "number": 1}).digest.hex()
    found = json.loads(run("ls", filled, "--json", "--namespace", wanted[:6]).stdout)
    assert [row["id"] for row in found["requests"]] == ["engine-1-0"]
    assert found["total"] == 1


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--label", "=x"), "--label"),
        (("--older-than", "soon"), "--older-than"),
        (("--newer-than", "-3d"), "--newer-than"),
        (("--larger-than", "big"), "--larger-than"),
        (("--smaller-than", "0"), "--smaller-than"),
        (("--namespace", "zz"), "--namespace"),
        (("--namespace", ""), "--namespace"),
        (("--sort", "luck"), "--sort"),
        (("--limit", "-1"), "--limit"),
    ],
)
def test_wrong_options_are_named(run, filled, options, part):
    done = run("ls", filled, *options)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_is_open_in_the_store_while_a_page_is_printed(three):
    """A page is a list of values: the store may be closed and changed before the page is printed."""
    url, _ = three
    with closing(open_backend(url, read_only=True)) as backend:
        page = list_requests(url, backend, Selection(), limit=2)
    assert [request.id for request in page.requests] == ["b", "a"]
