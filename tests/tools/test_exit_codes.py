"""Exit codes of the commands and the objects that they write with them, compared with
docs/json.md."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity
from persistkv.storage.inspection.adoptions import AdoptionView
from persistkv.storage.records import LoadReport
from persistkv.storage.store.savings import SavingsRecorder
from persistkv_tools.inspect.why import LoadView
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.damage import Damage
from tests.tools.json_fields import check_documented, documented_codes

BLOCK = 64 << 10
SMALL = ("--size", "4MiB", "--rounds", "1")
HUGE = "999PiB"  # more than any address space


class Case(NamedTuple):
    """A command with its expected exit code and output."""

    arguments: tuple[str, ...]
    """``{made}``: directory of the fixture ``made``; ``{tmp}``: directory of the test."""
    code: int
    part: str = ""
    """Part of the output, or of the error."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of stores and files that no test changes."""
    place = tmp_path_factory.mktemp("made")
    urls = {
        name: f"lmdb://{place}/{name}?placement=inline"
        for name in ("store", "damaged", "other")
    }
    with closing(open_backend(urls["store"])) as backend:
        writer = Contexts(backend, block_bytes=BLOCK)
        for number in range(10):  # 1.25 MiB: enough for a sample of the codecs
            writer.add(
                f"r{number}",
                f"{number}-a {number}-b",
                labels={"user": "anna"},
                age_s=100.0 + number,
            )
        writer.add("longer", "0-a 0-b c", age_s=10.0)
        writer.add("branch", "1-a z", age_s=5.0)
        record_savings(backend)
    with closing(open_backend(urls["damaged"])) as backend:
        writer = Contexts(backend)
        writer.add("one", "a b")
        writer.add("two", "c d")
    with Damage(urls["damaged"], writer.namespace) as damage:
        damage.flip_payload(writer.packs["one"], 5000)
    with closing(open_backend(urls["other"])) as backend:
        Contexts(backend, Identity.of({"weights": "theirs"})).add("theirs", "a")
    shutil.copytree(place / "store", place / "cut")
    os.truncate(place / "cut" / "data.mdb", 3 * 4096)
    (place / "text").write_text("hello\n")
    return place


def record_savings(backend: Backend) -> None:
    recorder = SavingsRecorder(backend, Identity.of({"model_name": "m"}))
    recorder.add(100, {"user": "anna"}, 10, 1.0)
    recorder.write()


FINDINGS = [
    Case(("verify", "{made}/damaged"), 1),
    Case(("doctor", "{tmp}/absent"), 1, "absent"),
    Case(("doctor", "{made}/cut"), 1, "{made}/cut"),
    Case(("doctor", "{made}/text"), 1, "is a file"),
    Case(("doctor", "tape:///kv"), 1, "url scheme"),
    Case(("doctor", "lmdb://{made}/store?color=red"), 1, "color"),
    Case(("why", "{made}/store", "--against", "{made}/other"), 1),
    Case(("prune", "{copy}", "--request", "r1", "--yes"), 1),
    Case(("copy", "{made}/damaged", "{tmp}/copy"), 1, '"one"'),
    Case(("copy", "{made}/damaged", "{tmp}/copy", "--dry-run"), 0),
]
SUCCESSES = [
    Case(("why", "{made}/store"), 0, '"comparisons": []'),
    Case(("copy", "{made}/store", "{tmp}/copy"), 0, '"requests": 12'),
    Case(("copy", "{made}/store", "file://{tmp}/copy"), 0, '"requests": 12'),
    Case(("copy", "{made}/store", "{tmp}/absent", "--dry-run"), 0, '"requests": 12'),
    Case(
        ("copy", "{made}/store", "{tmp}/copy", "--label", "user=nobody"),
        0,
        '"requests": 0',
    ),
    Case(("copy", "{made}/store", "{copy}"), 0, '"requests_held": 12'),
    Case(
        ("copy", "{made}/store", "{tmp}/small?capacity=2MiB", "--newest", "1"),
        0,
        '"requests": 1',
    ),
]
REFUSALS = [
    Case(("doctor", "somewhere"), 2, "scheme://"),
    Case(("doctor", "--no-such-option"), 2, "--no-such-option"),
    Case(("doctor", "{made}/store", "{made}/other"), 2, "no further argument"),
    Case(("bench",), 2, "requires a store"),
    Case(("bench", "tape:///kv", *SMALL), 2, "url scheme"),
    Case(("bench", "lmdb://{tmp}/new?color=red", *SMALL), 2, "color"),
    Case(("bench", "{tmp}/new", "--size", "5000KB"), 2, "--size"),
    Case(("bench", "{tmp}/new", "--size", HUGE), 2, "--size"),
    Case(("bench", "{tmp}/new", "--size", "9999999PiB"), 2, "--size"),
    Case(("bench", "{tmp}/new", "--rounds", "0"), 2, "--rounds"),
    Case(("bench", "{made}/text/new", *SMALL), 3, "Not a directory"),
    Case(("copy", "{made}/store"), 2, "DST"),
    Case(("copy", "tape:///kv", "{tmp}/new"), 2, "url scheme"),
    Case(("copy", "{made}/store", "tape:///kv"), 2, "url scheme"),
    Case(("copy", "{made}/store", "{made}/store"), 2, "another store"),
    Case(("copy", "{made}/store", "{tmp}/new", "nobody"), 2, "nobody"),
    Case(("copy", "{made}/store", "{tmp}/new", "--namespace", "0000"), 2, "0000"),
    Case(("copy", "{made}/store", "{tmp}/new", "--rate", "fast"), 2, "--rate"),
    Case(("copy", "{made}/store", "{tmp}/new", "--newest", "0"), 2, "--newest"),
    Case(("copy", "{made}/store", "{tmp}/new?capacity=1MiB"), 2, "too small"),
    Case(("copy", "{tmp}/absent", "{tmp}/new"), 3, "absent"),
    Case(("copy", "{made}/cut", "{tmp}/new"), 3, "truncated"),
    Case(("copy", "{made}/store", "{made}/text"), 3, "is a file"),
    Case(("copy", "{made}/store", "{made}"), 3, "no store"),
    Case(("copy", "{made}/store", "{made}/cut"), 3, "truncated"),
]


def name_of(case: Case) -> str:
    return " ".join((*case.arguments, str(case.code)))


def files_below(*places: Path) -> set[Path]:
    return {
        path for place in places for path in place.rglob("*") if path.name != "lock.mdb"
    }


def filled_in(text: str, made: Path, tmp_path: Path) -> str:
    """Replace directory names; ``{copy}``, ``{other}`` and ``{damaged}`` are copies that the
    command may change."""
    for name, source in (("copy", "store"), ("other", "other"), ("damaged", "damaged")):
        if f"{{{name}}}" in text:
            shutil.copytree(made / source, tmp_path / name)
            return text.replace(f"{{{name}}}", str(tmp_path / name))
    return text.replace("{made}", str(made)).replace("{tmp}", str(tmp_path))


@pytest.mark.parametrize("case", [*FINDINGS, *SUCCESSES], ids=name_of)
def test_command_completed_writes_documented_json(
    run: Run,
    made: Path,
    tmp_path: Path,
    case: Case,
) -> None:
    done = run(*(filled_in(text, made, tmp_path) for text in case.arguments), "--json")
    assert (done.returncode, done.stderr) == (case.code, "")
    assert filled_in(case.part, made, tmp_path) in done.stdout
    check_documented(case.arguments[0], json.loads(done.stdout))


@pytest.mark.parametrize("case", REFUSALS, ids=name_of)
def test_command_refused_prints_error_and_writes_no_files(
    run: Run,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    case: Case,
) -> None:
    monkeypatch.delenv("PERSISTKV_STORE", raising=False)
    before = files_below(made, tmp_path)
    done = run(*(filled_in(text, made, tmp_path) for text in case.arguments), "--json")
    assert (done.returncode, done.stdout) == (case.code, ""), done.stderr
    assert case.part in done.stderr
    assert done.stderr.startswith("usage: ") or done.stderr.count("\n") == 1
    assert files_below(made, tmp_path) == before


def test_documented_exit_codes_all_have_test_cases() -> None:
    elsewhere = {("serve-metrics", 0), ("top", 0)}  # test_metrics.py and test_top.py
    elsewhere |= {("bench", 0)}  # below
    elsewhere |= {("rebuild", 1), ("forget", 1)}  # test_rebuild.py, test_forget.py
    tested = {
        (case.arguments[0], case.code) for case in (*FINDINGS, *SUCCESSES, *REFUSALS)
    }
    assert tested >= documented_codes() - elsewhere


def test_doctor_exits_1_only_for_warning_or_problem(run: Run, made: Path) -> None:
    done = run("doctor", f"{made}/store", "--json")
    found = json.loads(done.stdout)
    check_documented("doctor", found, complete=True)
    assert {
        finding["level"] for finding in found["findings"] if "store" in finding["check"]
    } == {"ok"}
    bad = [
        finding
        for finding in found["findings"]
        if finding["level"] in ("warning", "problem")
    ]
    assert (done.returncode, done.stderr) == (int(bool(bad)), "")


@pytest.mark.parametrize(
    "arguments",
    [
        ("ls", "{made}/store"),
        ("stat", "{made}/store"),
        ("show", "{made}/store", "longer", "--tree"),
        ("report", "{made}/store", "-o", "{tmp}/report.html"),
        ("serve-metrics", "{made}/store", "--once"),
        ("verify", "{damaged}", "--repair", "--yes"),
        ("prune", "{copy}", "--older-than", "50s", "--yes"),
        ("set", "{copy}", "ttl=7d", "--yes"),
        ("pin", "{copy}", "r0"),
        ("unpin", "{copy}", "r0"),
        ("label", "{copy}", "r0", "a=b"),
        ("why", "{made}/store", "--against", "{made}/other"),
        ("copy", "{made}/store", "{tmp}/copy"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_command_json_has_every_documented_field(
    run: Run,
    made: Path,
    tmp_path: Path,
    arguments: tuple[str, ...],
) -> None:
    if arguments[0] == "serve-metrics":
        pytest.importorskip("prometheus_client")
    done = run(*(filled_in(text, made, tmp_path) for text in arguments), "--json")
    left_out = {"address"} if "--once" in arguments else set()
    # no engine of another release
    left_out |= {f"adoptions[].{name}" for name in AdoptionView.__struct_fields__}
    # no engine
    left_out |= {f"loads[].{name}" for name in LoadView.__struct_fields__}
    check_documented(
        arguments[0], json.loads(done.stdout), left_out=left_out, complete=True
    )


@pytest.fixture
def engine(contexts: tuple[str, Contexts]) -> Iterator[str]:
    """URL of a store with a request ``one`` that an engine uses."""
    url, writer = contexts
    writer.add("one", "a b c d")
    stop = threading.Event()

    def publish(backend: Backend) -> None:
        status = make_status(
            "e1",
            namespace=writer.namespace.hex(),
            time=time.time(),
            load_counts={"loaded": 1, "refused": 1},
            load_reports=[
                LoadReport("r1", "loaded", 0.1, 0.5, time.time()),
                LoadReport("q1", "refused", None, None, time.time()),
            ],
        )
        backend.publish_status("e1", status.encode())

    def run_engine() -> None:
        with closing(open_backend(url)) as backend:
            while not stop.is_set():
                publish(backend)
                time.sleep(0.01)

    publish(writer.backend)
    record_savings(writer.backend)
    thread = threading.Thread(target=run_engine)
    thread.start()
    try:
        yield url
    finally:
        stop.set()
        thread.join(60)


def test_top_json_with_engine_has_every_documented_field(run: Run, engine: str) -> None:
    done = run("top", engine, "--interval", "0.4s", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    check_documented("top", json.loads(done.stdout), complete=True)


def test_why_request_shows_what_became_of_its_blocks(run: Run, engine: str) -> None:
    done = run("why", engine, "--request", "r1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "loaded in 0.100 s; computing was expected to take 0.500 s" in done.stdout
    done = run("why", engine, "--request", "r", "--json")
    report = json.loads(done.stdout)
    check_documented("why", report)
    assert [load["reason"] for load in report["loads"]] == ["loaded"]


def test_why_request_refused_names_tenant_and_options(run: Run, engine: str) -> None:
    done = run("why", engine, "--request", "q1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "neither used nor filled the store (refused)" in done.stdout
    assert "names no tenant" in done.stdout


def test_why_request_unknown_exits_with_advice(run: Run, engine: str) -> None:
    done = run("why", engine, "--request", "absent")
    assert done.returncode != 0
    assert "not one of the last 64" in done.stderr


def test_bench_json_has_every_documented_field(run: Run, made: Path) -> None:
    before = files_below(made)
    done = run("bench", f"{made}/store", *SMALL, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    check_documented("bench", json.loads(done.stdout), complete=True)
    assert files_below(made) == before


def test_bench_full_disk_exits_3(tmp_path: Path) -> None:
    """A limit on file sizes acts like a full disk for the plain file; the store evicts before it
    reaches the limit."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (18 << 20, 18 << 20))

    options = ("--size", "4MiB", "--rounds", "5", "--json")
    command = [
        sys.executable,
        "-m",
        "persistkv_tools",
        "bench",
        f"{tmp_path}/new?capacity=16MiB",
        *options,
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=limit,
    )
    if "no plain speed" in done.stdout:
        pytest.skip("the file system has no O_DIRECT, and bench writes no plain file")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (3, "", 1), (
        done.stderr
    )
    assert "plain file" in done.stderr
    assert list(tmp_path.iterdir()) == []
