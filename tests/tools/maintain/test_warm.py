from __future__ import annotations

import json
import threading
import time
from contextlib import closing

import pytest

from persistkv.storage import open_backend
from persistkv.storage.host.prewarm import acknowledge_warm, pending_warm
from tests.storage.statuses import make_status


@pytest.fixture
def store(contexts):
    url, writer = contexts
    writer.add("one", "s t a b", labels={"user": "anna"})
    writer.add("two", "s t c", labels={"user": "bert"})
    return url, writer


def publish_engine(backend, namespace, engine="e1"):
    backend.publish_status(
        engine,
        make_status(
            engine, namespace=namespace.hex(), time=time.time(), interval_s=60.0
        ).encode(),
    )


def test_warm_id_prefix_is_pending_until_withdrawn(run, store):
    url, writer = store
    done = run("warm", url, "on", "--ttl", "10m")
    assert done.returncode == 0, done.stderr
    assert "no running engine of this model has published its status" in done.stdout
    assert "engines that start within 10m and prewarm" in done.stdout
    (asked,) = pending_warm(writer.backend, writer.namespace, "e1")
    assert (asked.request, asked.ttl_s) == ("one", 600.0)
    assert run("warm", url, "one", "--withdraw").returncode == 0
    assert pending_warm(writer.backend, writer.namespace, "e1") == []


def test_warm_label_requests_matches_and_no_selection_exits_2(run, store):
    url, writer = store
    publish_engine(writer.backend, writer.namespace)
    found = json.loads(run("warm", url, "--label", "user", "--json").stdout)["requests"]
    assert {(one["request"], one["blocks"], one["live_engines"]) for one in found} == {
        ("one", 4, 1),
        ("two", 3, 1),
    }
    assert len(pending_warm(writer.backend, writer.namespace, "e1")) == 2
    assert run("warm", url).returncode == 2
    assert run("warm", url, "none").returncode == 2
    assert "no request" in run("warm", url, "--label", "user=carl").stdout


@pytest.mark.parametrize(("missing", "code"), [(0, 0), (1, 1)])
def test_warm_wait_acknowledged_exits_1_only_for_missing_blocks(
    run, store, missing, code
):
    url, writer = store
    publish_engine(writer.backend, writer.namespace)
    stop = threading.Event()

    def engine():
        with closing(open_backend(url)) as backend:
            while not stop.is_set():
                for asked in pending_warm(backend, writer.namespace, "e1"):
                    acknowledge_warm(
                        backend, asked, "e1", blocks=4 - missing, missing=missing
                    )
                publish_engine(backend, writer.namespace)
                time.sleep(0.01)

    thread = threading.Thread(target=engine)
    thread.start()
    try:
        done = run("warm", url, "one", "--wait", "100s")
    finally:
        stop.set()
        thread.join(60)
    assert done.returncode == code, done.stdout
    assert f"engine e1 promotes {4 - missing} blocks" in done.stdout


def test_warm_wait_without_acknowledgement_exits_1(run, store):
    url, writer = store
    publish_engine(writer.backend, writer.namespace)
    done = run("warm", url, "one", "--wait", "1s")
    assert done.returncode == 1
    assert (
        "no engine answered: they prewarm only if configured (prewarm_share"
        in done.stdout
    )
    assert "--wait 1m shows their answers" in run("warm", url, "one").stdout
