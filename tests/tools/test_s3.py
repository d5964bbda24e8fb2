"""The commands show the same content in a bucket as on a disk."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from persistkv.storage import open_backend
from tests.storage.statuses import make_status
from tests.tools.conftest import Run
from tests.tools.contexts import Contexts
from tests.tools.middle_pack import MiddlePack

boto3 = pytest.importorskip("boto3")
server = pytest.importorskip("moto.server")

pytestmark = pytest.mark.slow

ACCESS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    found = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    found.start()
    host, port = found.get_host_and_port()
    yield f"http://{host}:{port}"
    found.stop()


@pytest.fixture
def store(endpoint: str) -> Iterator[str]:
    """URL of a store of three requests in a new bucket."""
    with mock.patch.dict("os.environ", ACCESS):
        bucket = f"test-{uuid.uuid4().hex}"
        client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
        client.create_bucket(Bucket=bucket)
        client.close()
        url = f"s3://{bucket}/kv?endpoint_url={endpoint}&refresh=0s"
        with closing(open_backend(url)) as backend:
            writer = Contexts(backend)
            writer.add("one", "a b", labels={"user": "anna"})
            # the server's clock has whole seconds, so a reuse in the same second does not show
            time.sleep(1.1)
            writer.add("two", "a b c")
            writer.add("three", "x y")
            backend.publish_status(
                "e1",
                make_status(
                    "e1", time=time.time(), interval_s=60.0, breaker="closed"
                ).encode(),
            )
        yield url


def shown(run: Run, command: str, url: str, *options: str, code: int = 0) -> Any:
    done = run(command, url, *options, "--json")
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_inspection_commands_s3_store_match_its_content(
    run: Run, store: str, tmp_path: Path
) -> None:
    found = {request["id"]: request for request in shown(run, "ls", store)["requests"]}
    assert found.keys() == {"one", "two", "three"}
    assert (found["one"]["shared_by"], found["three"]["shared_by"]) == (1, 0)
    assert (found["one"]["reused"], found["two"]["reused"]) == (True, False)
    totals = shown(run, "stat", store)
    assert (totals["requests"], totals["blocks"], totals["referenced_blocks"]) == (
        3,
        5,
        7,
    )
    assert shown(run, "show", store, "two", "--tree")["context"]["shared_blocks"] == 2
    assert shown(run, "verify", store)["problems"] == 0
    (engine,) = shown(run, "top", store, "--interval", "1s")["engines"]
    assert (engine["live"], engine["breaker"]) == (True, "closed")
    assert (
        shown(run, "report", store, "-o", "r.html")["bytes"]
        == (tmp_path / "r.html").stat().st_size
    )


def test_pin_label_and_prune_s3_store_change_requests(
    run: Run, store: str, tmp_path: Path
) -> None:
    assert shown(run, "pin", store, "three")["pinned"]
    (changed,) = shown(run, "label", store, "three", "user=bert")["requests"]
    assert changed["labels"] == {"user": "bert"}
    found = {request["id"]: request for request in shown(run, "ls", store)["requests"]}
    assert (found["three"]["pinned"], found["three"]["labels"]) == (
        True,
        {"user": "bert"},
    )
    done = shown(run, "prune", store, "--label", "user=anna", "--yes")["done"]
    assert (done["requests"], done["goes"]["packs"]) == (1, 0)
    assert len(shown(run, "ls", store)["requests"]) == 2
    assert (
        shown(run, "prune", store, "--request", "two", "--yes")["done"]["requests"] == 1
    )
    assert [row["id"] for row in shown(run, "ls", store)["requests"]] == ["three"]
    assert shown(run, "verify", store)["problems"] == 0


def test_verify_repair_s3_bad_middle_pack_keeps_blocks_before_it(
    run: Run, store: str, endpoint: str
) -> None:
    url = store.replace("/kv?", "/middle?")
    context = MiddlePack(url)
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    bucket = url.partition("://")[2].partition("/")[0]
    (name,) = (
        entry["Key"]
        for entry in client.list_objects_v2(Bucket=bucket)["Contents"]
        if context.pack.hex() in entry["Key"]
    )
    stored = bytearray(client.get_object(Bucket=bucket, Key=name)["Body"].read())
    stored[5000] ^= 0x40
    client.put_object(Bucket=bucket, Key=name, Body=bytes(stored))
    client.close()
    context.check_repair(run)


def test_copy_from_and_to_s3_store_keeps_requests(
    run: Run, store: str, tmp_path: Path
) -> None:
    here = f"lmdb://{tmp_path}/here"
    assert shown(run, "copy", store, here)["copied"]["requests"] == 3
    back = store.replace("/kv?", "/back?")
    assert shown(run, "copy", here, back)["copied"]["requests"] == 3
    assert shown(run, "copy", here, back)["copied"]["requests_held"] == 3
    one, other = shown(run, "ls", store)["requests"], shown(run, "ls", back)["requests"]
    assert {(r["id"], r["blocks"], r["created"]) for r in one} == {
        (r["id"], r["blocks"], r["created"]) for r in other
    }


@pytest.mark.parametrize("scheme", ["s3", "file", "lmdb"])
def test_copy_between_kinds_of_stores_keeps_requests_and_labels(
    run: Run,
    store: str,
    tmp_path: Path,
    scheme: str,
) -> None:
    places = {
        "s3": store.replace("/kv?", "/other?"),
        "file": f"file://{tmp_path}/directory",
        "lmdb": f"lmdb://{tmp_path}/local",
    }
    first = places.pop(scheme)
    assert shown(run, "copy", store, first)["copied"]["requests"] == 3
    for second in places.values():
        assert shown(run, "copy", first, second)["copied"]["requests"] == 3
        assert shown(run, "copy", second, first)["copied"]["requests_held"] == 3
        assert shown(run, "verify", second)["problems"] == 0
        listed = {}
        for request in shown(run, "ls", second)["requests"]:
            listed[request["id"]] = request["labels"]
        assert listed == {"one": {"user": "anna"}, "two": {}, "three": {}}


def test_copy_s3_store_to_one_with_key_reproduces_content(
    run: Run, store: str, tmp_path: Path
) -> None:
    """The documented change of a key: both stores have the same prefix of one bucket."""
    key = tmp_path / "key"
    key.write_text("0123456789abcdef" * 4)
    with_key = f"{store}&key_file={key}"
    assert shown(run, "copy", store, with_key)["copied"]["requests"] == 3
    assert len(shown(run, "ls", with_key)["requests"]) == 3
    assert len(shown(run, "ls", store)["requests"]) == 3
    assert shown(run, "verify", with_key)["problems"] == 0
    back = shown(run, "copy", with_key, store)["copied"]
    assert (back["requests"], back["requests_held"]) == (0, 3)


def test_unpin_why_doctor_and_metrics_s3_store_succeed(run: Run, store: str) -> None:
    assert not shown(run, "unpin", store, "one")["pinned"]
    assert shown(run, "why", store, "--against", store)["comparisons"][0]["matches"]
    findings = {
        finding["check"]: finding["level"]
        for finding in json.loads(run("doctor", store, "--json").stdout)["findings"]
    }
    assert "problem" not in findings.values()
    exported = run("serve-metrics", store, "--once")
    assert exported.returncode == 0, exported.stderr
    assert "persistkv_up" in exported.stdout
    assert shown(run, "stat", store)["free"] is None


def test_bench_s3_store_compares_with_plain_client_and_cleans_up(
    run: Run, store: str, endpoint: str
) -> None:
    found = shown(run, "bench", store, "--size", "4MiB", "--rounds", "1")
    assert [figure["name"] for figure in found["figures"]] == ["store", "load"]
    for figure in found["figures"]:
        assert figure["ratio"] == pytest.approx(
            figure["limit_seconds"] / figure["seconds"], rel=0.01, abs=0.001
        )
    left = boto3.client(
        "s3", endpoint_url=endpoint, region_name="us-east-1"
    ).list_objects_v2(Bucket=store.partition("://")[2].partition("/")[0])
    assert not [
        entry["Key"] for entry in left["Contents"] if not entry["Key"].startswith("kv/")
    ]
    assert len(shown(run, "ls", store)["requests"]) == 3
