from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.storage.inspection.listing import Sort, list_requests
from persistkv.storage.inspection.requests import short_ids
from persistkv.storage.inspection.selection import Selection
from persistkv.testing import FaultyBackend, MemoryBackend
from persistkv.testing.samples import sample_manifest
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts


def test_ls_store_open_elsewhere_lists_requests(start: Run, filled: str) -> None:
    done = start("ls", filled)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:6]] == [
        "engine-1",
        "engine-0-1",
        "engine-0-0",
    ]
    assert "12.0 KiB" in done.stdout
    assert "3 requests in 2 namespaces" in done.stdout
    assert "\x1b" not in done.stdout


def test_ls_json_has_exact_values(run: Run, filled: str) -> None:
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
        "short_id": "engine-0-0",
        "context": "",
        "copies": 1,
        "ttl_s": None,
        "priority": "normal",
        "expires": None,
    }


def test_short_ids_are_unique_beginnings_of_at_least_8_characters() -> None:
    names = ["cmpl-12345678", "cmpl-12345679", "cmpl-2", "abc", "0123456789abcdef"]
    assert short_ids(names) == {
        "cmpl-12345678": "cmpl-12345678",
        "cmpl-12345679": "cmpl-12345679",
        "cmpl-2": "cmpl-2",
        "abc": "abc",
        "0123456789abcdef": "01234567",
    }


class TestIds:
    LONG = tuple(f"0c4d{number:x}6a0b1f24c7e8d9a0b1c2d3e4f50" for number in range(12))

    @pytest.fixture
    def store(self, contexts: tuple[str, Contexts]) -> str:
        url, writer = contexts
        for number, name in enumerate(self.LONG):
            writer.add(
                name, f"a b{number}", labels={"user": "anna"}, age_s=100.0 + number
            )
        return url

    def test_ls_short_ids_begin_full_ids_and_differ(
        self, run: Run, store: tuple[str, float, pytest.MonkeyPatch]
    ) -> None:
        rows = run("ls", store).stdout.splitlines()[3:15]
        shown = [row.split()[0] for row in rows]
        assert shown == [name[:8] for name in self.LONG]
        listed = json.loads(run("ls", store, "--json").stdout)["requests"]
        assert [request["short_id"] for request in listed] == shown

    @pytest.mark.parametrize("command", ["show", "pin", "label", "copy", "prune"])
    def test_every_command_accepts_short_and_long_ids(
        self,
        run: Run,
        store: tuple[str, float, pytest.MonkeyPatch],
        tmp_path: Path,
        command: str,
    ) -> None:
        for name in (self.LONG[3][:5], self.LONG[3][:8], self.LONG[3]):
            arguments = {
                "prune": ("--request", name, "--dry-run"),
                "label": (name, "a=b"),
                "copy": (f"{tmp_path}/{name}", name),
            }
            chosen = arguments.get(command, (name,))
            done = run(command, store, *chosen, "--json")
            assert done.returncode == 0, done.stderr
            if command == "copy":
                assert json.loads(done.stdout)["copied"]["requests"] == 1
            else:
                assert self.LONG[3] in done.stdout

    def test_ls_ids_and_csv_contain_whole_ids(
        self, run: Run, store: tuple[str, float, pytest.MonkeyPatch]
    ) -> None:
        assert run("ls", store, "--ids").stdout.split() == list(self.LONG)
        assert run("ls", store, "--ids", "--limit", "2").stdout.split() == list(
            self.LONG[:2]
        )
        rows = list(csv.DictReader(run("ls", store, "--csv").stdout.splitlines()))
        assert [row["id"] for row in rows] == list(self.LONG)
        assert (rows[0]["labels"], rows[0]["tokens"], rows[0]["group_blocks"]) == (
            "user=anna",
            "32",
            "2",
        )
        assert run("ls", store, "--ids", "--csv").returncode == 2

    @pytest.mark.parametrize("words", [("{url}",), ()])
    def test_shell_completion_returns_ids(
        self, start: Run, store: str, words: tuple[str, ...]
    ) -> None:
        def completed(incomplete: str) -> list[str]:
            typed = ["show", *(word.format(url=place) for word in words), incomplete]
            variable = {} if words else {"PERSISTKV_STORE": place}
            done = start(*typed, PERSISTKV_COMPLETE="1", **variable)
            return done.stdout.split()

        place = store.partition("?")[0].removeprefix("lmdb://")
        assert completed("0c4d") == list(self.LONG)
        assert completed(self.LONG[7][:6]) == [self.LONG[7]]
        assert completed("nothing") == []

    def test_bash_completion_url_split_at_colons_returns_ids(
        self, start: Run, store: str
    ) -> None:
        place = store.partition("?")[0].removeprefix("lmdb:")
        done = start("show", "lmdb", ":", place, "0c4d", PERSISTKV_COMPLETE="1")
        assert done.stdout.split() == list(self.LONG)


class TestCopies:
    """Requests of the same context and labels are one row of the table."""

    @pytest.fixture
    def store(self, contexts: tuple[str, Contexts]) -> str:
        url, writer = contexts
        for number in range(150):
            writer.add(f"engine-same-{number:03d}", "a b c", age_s=500.0 - number)
        writer.add("engine-other", "a b d", age_s=400.0)
        writer.add("engine-labelled", "a b c", labels={"user": "anna"}, age_s=10.0)
        return url

    def test_ls_same_context_is_one_row_with_count(self, run: Run, store: str) -> None:
        rows = run("ls", store).stdout.splitlines()
        assert "copies" in rows[1]
        shown = {row.split()[0]: row for row in rows[3:6]}
        assert list(shown) == ["engine-l", "engine-same-149", "engine-o"]
        assert " 150 " in shown["engine-same-149"]
        assert "152 requests" in run("ls", store).stdout

    def test_list_requests_pages_contain_each_context_once(
        self,
        contexts: tuple[str, Contexts],
        store: str,
    ) -> None:
        backend = contexts[1].backend
        for sort, reverse in product(Sort, (False, True)):
            listed = partial(
                list_requests,
                "",
                backend,
                Selection(),
                sort=sort,
                reverse=reverse,
                merge_copies=True,
            )
            found = []
            for offset in range(3):
                page = listed(offset=offset, limit=1)
                found += page.requests
            whole = listed()
            assert (page.matched, page.rows, whole.rows) == (152, 3, 3), sort
            assert [(view.id, view.copies) for view in found] == [
                (view.id, view.copies) for view in whole.requests
            ]
            assert sorted(view.copies for view in found) == [1, 1, 150]

    def test_ls_json_and_ids_list_every_copy(self, run: Run, store: str) -> None:
        assert len(json.loads(run("ls", store, "--json").stdout)["requests"]) == 152
        assert len(run("ls", store, "--ids").stdout.split()) == 152


class TestModels:
    @pytest.fixture
    def store(self, url: str) -> str:
        with closing(open_backend(url)) as backend:
            for number, name in enumerate(
                ("/models/llama", "/models/llama", "org/qwen")
            ):
                identity = Identity.of({"block_size": number, "model_name": name})
                Contexts(backend, identity).add(f"request{number}", "a b c")
        return url

    def test_ls_and_show_print_model_of_request(self, run: Run, store: str) -> None:
        text = run("ls", store).stdout
        assert {
            line.split()[0]: line.split()[-2] for line in text.splitlines()[3:6]
        } == {
            "request0": "/models/llama",
            "request1": "/models/llama",
            "request2": "org/qwen",
        }
        assert "org/qwen" in run("show", store, "request2").stdout

    def test_stat_totals_are_grouped_by_model(self, run: Run, store: str) -> None:
        found = {
            one["model"]: one
            for one in json.loads(run("stat", store, "--json").stdout)["models"]
        }
        llama = found["/models/llama"]
        assert (llama["namespaces"], llama["requests"], llama["blocks"]) == (2, 2, 6)
        assert found["org/qwen"]["stored_bytes"] * 2 == llama["stored_bytes"]
        rows = [line.split() for line in run("stat", store).stdout.splitlines()]
        assert [
            "/models/llama",
            "2",
            "2",
            "2",
            "6",
            "24.0",
            "KiB",
            "24.0",
            "KiB",
        ] in rows


class TestUse:
    @pytest.fixture
    def used(self, contexts: tuple[str, Contexts]) -> str:
        url, writer = contexts
        writer.add("short", "a b")
        writer.add("lone", "x y")
        writer.add("long", "a b c", restored=32)
        writer.backend.commit(writer.namespace, CommitBatch(pins=[("lone", True)]))
        return url

    def test_ls_shows_hits_sharing_pins_and_stored_bytes(
        self, run: Run, used: str
    ) -> None:
        found = {
            request["id"]: request
            for request in json.loads(run("ls", used, "--json").stdout)["requests"]
        }
        told = {
            name: (view["reused"], view["shared_by"], view["pinned"])
            for name, view in found.items()
        }
        assert told == {
            "short": (True, 1, False),
            "lone": (False, 0, True),
            "long": (False, 0, False),
        }
        assert {name: view["hits"] for name, view in found.items()} == {
            "short": 1,
            "lone": 0,
            "long": 0,
        }
        assert {name: view["stored_bytes"] for name, view in found.items()} == {
            "short": 8192,
            "lone": 8192,
            "long": 12288,
        }
        rows = {
            line.split()[0]: line.split()[-2:]
            for line in run("ls", used).stdout.splitlines()
            if line.split()
        }
        assert (rows["short"][-1], rows["lone"]) == ("1", ["0", "yes"])
        by_hits = json.loads(run("ls", used, "--sort", "hits", "--json").stdout)[
            "requests"
        ]
        assert by_hits[0]["id"] == "short"

    def test_ls_hits_count_later_restores_and_no_copies(
        self, run: Run, contexts: tuple[str, Contexts]
    ) -> None:
        url, writer = contexts
        for name, text, restored in (
            ("short", "a b", 0),
            ("same", "a b", 32),
            ("again", "a b", 0),
            ("long", "a b c", 32),
            ("longer", "a b c d", 48),
        ):
            writer.add(name, text, restored=restored)
        found = {
            request["id"]: request
            for request in json.loads(run("ls", url, "--json").stdout)["requests"]
        }
        assert {name: view["hits"] for name, view in found.items()} == {
            "short": 3,
            "same": 2,
            "again": 2,
            "long": 1,
            "longer": 0,
        }
        assert {name: view["shared_by"] for name, view in found.items()} == {
            "short": 4,
            "same": 4,
            "again": 4,
            "long": 1,
            "longer": 0,
        }

    def test_ls_row_of_copies_shows_restores_of_its_oldest(
        self, run: Run, contexts: tuple[str, Contexts]
    ) -> None:
        url, writer = contexts
        for number, restored in enumerate((0, 0, 32, 32, 0)):
            writer.add(f"r{number}", "a b", restored=restored, age_s=60.0 - number)
        lines = [line.split() for line in run("ls", url).stdout.splitlines()]
        header, row = [line for line in lines if line and line[0][0] in "r"][:2]
        shown = dict(zip(reversed(header), reversed(row), strict=False))
        assert (shown["copies"], shown["hits"]) == ("5", "2")

    def test_show_newest_copy_has_hits_of_its_row_of_ls(
        self, run: Run, contexts: tuple[str, Contexts]
    ) -> None:
        url, writer = contexts
        for number, restored in enumerate((0, 32)):
            writer.add(f"r{number}", "a b", restored=restored, age_s=60.0 - number)
        context = json.loads(run("show", url, "r1", "--json").stdout)["context"]
        assert (context["request"]["hits"], context["request"]["copies"]) == (0, 1)
        assert (context["copies_hits"], context["copies"]) == (1, 2)
        shown = run("show", url, "r1").stdout
        assert (
            "2 requests of this context and labels, one row of ls; hits of all: 1"
            in (" ".join(shown.split()))
        )

    def test_ls_never_hit_lists_requests_without_hits(
        self, run: Run, used: str
    ) -> None:
        found = json.loads(run("ls", used, "--never-hit", "--json").stdout)
        assert {request["id"] for request in found["requests"]} == {"lone", "long"}
        assert (found["matched"], found["total"]) == (2, 3)

    def test_ls_sort_used_orders_by_last_use(
        self, contexts: tuple[str, Contexts], monkeypatch: pytest.MonkeyPatch, run: Run
    ) -> None:
        url, writer = contexts
        clock = time.time()
        for number, name in enumerate(("a", "b", "c")):
            monkeypatch.setattr(
                time, "time", lambda number=number: clock + 100 * number
            )
            writer.add(name, f"{name} {name}{name}")
        writer.add("d", "a aa dd")  # uses the blocks of "a" again
        found = json.loads(run("ls", url, "--sort", "used", "--json").stdout)[
            "requests"
        ]
        used = [request["last_used"] for request in found]
        assert used == sorted(used, reverse=True)
        assert found[-1]["id"] == "b"

    def test_list_requests_store_without_use_records_returns_none(
        self, memory_store: Callable[[], MemoryBackend]
    ) -> None:
        backend = FaultyBackend.of(memory_store())
        backend.after(
            "catalogue",
            lambda catalogue, namespace: SimpleNamespace(
                manifests=catalogue.manifests, uses=lambda ids: [None for _ in ids]
            ),
        )
        Contexts(backend).add("one", "a b")
        (view,) = list_requests("", backend, Selection(), sort=Sort.USED).requests
        assert (view.last_used, view.reused, view.shared_by, view.pinned) == (
            None,
            None,
            None,
            None,
        )
        assert list_requests("", backend, Selection(never_hit=True)).matched == 0


def test_ls_label_with_markup_is_printed_literally(run: Run, url: str) -> None:
    with closing(open_backend(url)) as backend:
        namespace = backend.open_namespace(Identity.of({})).id
        labels = {"file": "[bold]x[/nothing]", "who": "me"}
        backend.commit(
            namespace, CommitBatch(manifests=[sample_manifest("one", labels=labels)])
        )
    assert "file=[bold]x[/nothing] who=me" in run("ls", url).stdout


def test_ls_page_prints_offset_of_next_page(
    run: Run, contexts: tuple[str, Contexts]
) -> None:
    url, writer = contexts
    for number in range(60):
        writer.add(f"r{number:02d}", f"a b{number}", age_s=100.0 + number)
    first = run("ls", url)
    assert "r49" in first.stdout
    assert "r50" not in first.stdout
    assert "rows 1 to 50 of 60; next page: --offset 50" in first.stdout
    rest = run("ls", url, "--offset", "50").stdout
    assert "r50" in rest
    assert "rows 51 to 60 of 60\n" in rest
    assert len(json.loads(run("ls", url, "--json").stdout)["requests"]) == 60
    assert (
        len(json.loads(run("ls", url, "--json", "--limit", "7").stdout)["requests"])
        == 7
    )
    everything = run("ls", url, "--limit", "0").stdout
    assert all(f"r{number:02d}" in everything for number in range(60))


@pytest.fixture
def three(contexts: tuple[str, Contexts]) -> tuple[str, Contexts]:
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
def test_ls_sort_orders_requests_and_reverse_inverts(
    run: Run, three: tuple[str, Contexts], sort: Sort
) -> None:
    url, _ = three
    for limit in ((), ("--limit", "3")):
        rows = json.loads(
            run("ls", url, "--json", "--sort", sort.value, *limit).stdout
        )["requests"]
        assert [row["id"] for row in rows] == ORDERS[sort]
        rows = json.loads(
            run("ls", url, "--json", "--sort", sort.value, "--reverse", *limit).stdout
        )["requests"]
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
def test_ls_filter_lists_matching_requests(
    run: Run, three: tuple[str, Contexts], options: tuple[str, ...], expected: str
) -> None:
    found = json.loads(run("ls", three[0], "--json", "--sort", "id", *options).stdout)
    assert "".join(row["id"] for row in found["requests"]) == expected
    assert (found["matched"], found["total"]) == (len(expected), 3)


def test_ls_namespace_lists_only_its_requests(run: Run, filled: str) -> None:
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
        (("--namespace", "zz"), "namespace 'zz'"),
        (("--namespace", ""), "namespace ''"),
        (("--sort", "luck"), "--sort"),
        (("--limit", "-1"), "--limit"),
    ],
)
def test_ls_bad_option_exits_2_naming_it(
    run: Run, filled: str, options: tuple[str, str], part: str
) -> None:
    done = run("ls", filled, *options)
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr


def test_list_requests_page_is_usable_after_store_closes(
    three: tuple[str, Contexts],
) -> None:
    """A page is a list of values: the store may be closed and changed before the page is
    printed."""
    url, _ = three
    with closing(open_backend(url, read_only=True)) as backend:
        page = list_requests(url, backend, Selection(), limit=2)
    assert [request.id for request in page.requests] == ["b", "a"]


class TestExpiry:
    @pytest.fixture
    def store(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> tuple[str, float, pytest.MonkeyPatch]:
        """URL of a store with a ttl of 7 days: of its requests, ``old`` and ``own`` have expired
        since, the pinned one cannot."""
        url = f"lmdb://{tmp_path}/store?ttl=7d"
        now = time.time()
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend)
            writer.add("old", "a b", labels={"user": "anna"})
            writer.add("pinned", "c d")
            writer.add("own", "e f", ttl_s=60.0)
            backend.commit(writer.namespace, CommitBatch(pins=[("pinned", True)]))
        return url, now, monkeypatch

    def at(self, store: tuple[str, float, pytest.MonkeyPatch], days: float) -> str:
        """Let commands run this many days after the requests were stored."""
        url, now, monkeypatch = store
        monkeypatch.setattr(time, "time", lambda: now + 86_400.0 * days)
        return url

    def expiries(self, run: Run, url: str) -> dict[str, float | None]:
        found = {}
        for row in json.loads(run("ls", url, "--json").stdout)["requests"]:
            found[row["id"]] = row["expires"]
        return found

    def test_ls_and_show_print_expiry(
        self, run: Run, store: tuple[str, float, pytest.MonkeyPatch]
    ) -> None:
        now = store[1]
        url = self.at(store, 1)
        found = self.expiries(run, url)
        assert found["old"] == pytest.approx(now + 7 * 86_400.0, abs=60.0)
        assert found["own"] == pytest.approx(now + 60.0, abs=60.0)
        assert found["pinned"] is None
        listed = {}
        for line in run("ls", url).stdout.splitlines():
            for name in found:
                if line.strip().startswith(name):
                    listed[name] = line
        assert "in 6d" in listed["old"]
        assert "expired" in listed["own"]
        assert "expired" not in listed["pinned"]
        assert "in 6d" in run("show", url, "old").stdout
        assert "expired" in run("show", url, "own").stdout

    def test_ls_right_after_store_prints_whole_ttl(
        self, run: Run, store: tuple[str, float, pytest.MonkeyPatch]
    ) -> None:
        url = self.at(store, 0)
        lines = run("ls", url).stdout.splitlines()
        (old,) = [line for line in lines if line.strip().startswith("old")]
        assert "in 7d" in old
        assert "in 7d" in run("show", url, "old").stdout

    def test_ls_store_without_ttl_has_no_column_of_expiry(
        self, run: Run, contexts: tuple[str, Contexts]
    ) -> None:
        url, writer = contexts
        writer.add("one", "a b")
        assert "expires" not in run("ls", url).stdout
        assert self.expiries(run, url) == {"one": None}

    @pytest.mark.parametrize(
        ("days", "expected"), [(0, set()), (1, {"own"}), (8, {"old", "own"})]
    )
    def test_expired_option_selects_expired_requests(
        self,
        run: Run,
        store: tuple[str, float, pytest.MonkeyPatch],
        days: int,
        expected: set[str],
    ) -> None:
        url = self.at(store, days)
        listed = run("ls", url, "--expired", "--ids")
        assert set(listed.stdout.split()) == expected
        done = run("prune", url, "--expired", "--yes", "--json")
        assert done.returncode == 0, done.stderr
        plan = json.loads(done.stdout)["plan"]
        assert {row["id"] for row in plan["requests"]} == expected
        assert self.expiries(run, url).keys() == {"old", "own", "pinned"} - expected
        assert run("verify", url).returncode == 0

    def test_own_ttl_counts_from_last_use(
        self, run: Run, store: tuple[str, float, pytest.MonkeyPatch]
    ) -> None:
        url = self.at(store, 0)
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend)
            before = self.expiries(run, url)["own"]
            assert before is not None
            time_of_use = store[1] + 30.0
            store[2].setattr(time, "time", lambda: time_of_use)
            (space,) = backend.namespaces()
            chain = backend.catalogue(space.id).chain("own")
            assert chain is not None
            (pack,) = chain
            backend.commit(writer.namespace, CommitBatch(touches=[pack]))
            after = self.expiries(run, url)["own"]
            assert after is not None
            assert after > before
