"""Effects of object store faults on an engine and its store: python -m tests.servers.fault_table

An engine ticks each millisecond and submits small stores and loads. Its host process reaches the
server over a proxy that breaks connections. Each fault lasts ``--seconds``. The calls of the
engine's thread and its loads during the fault are compared with those before it, with the same load
on the same server. After the fault the engine submits lost blocks again. Then a new handle that
bypasses the proxy checks all content.

The store has a ttl of an hour and a capacity that is not reached: nothing may expire or be evicted.

The run fails for wrong, missing (expired, evicted, lost) or duplicate blocks, for blocks that could
not be stored again, and for a breaker that does not open or close. Times are reported only. Without
``--endpoint`` the server is moto, which cannot be killed, because it keeps its content in memory.
``make test-faults`` runs against Ceph and puts the table into docs/reliability.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from unittest import mock
from urllib.parse import urlsplit

import numpy as np
from botocore.exceptions import BotoCoreError, ClientError

from benchmarks.rig import machine, percentile
from benchmarks.s3_rig import make_bucket, plain_client, server
from benchmarks.store_rig import Rig
from persistkv.config import StoreUrl
from persistkv.storage.backend import ReadSpan
from persistkv.storage.host.client import StoreClient
from persistkv.storage.identity import Identity
from persistkv_s3 import S3Backend
from tests.backends.s3.faults import SERVERS, FaultProxy, wait_for_port
from tests.servers.fault_load import BLOCK, PATIENCE_S, ROWS, Load
from tests.servers.writers import wait_until_merged

if TYPE_CHECKING:
    from types_boto3_s3 import S3Client
    from types_boto3_s3.type_defs import ObjectIdentifierTypeDef

T = TypeVar("T")

PROMPT = "deadline=5s&slow=5s"
COMMON = "refresh=1s&cache=no&ttl=1h&capacity=100GiB"
YEAR_S = 365 * 86_400
# 2 ms: a step of an engine on a GPU takes 10 ms and more
MOST_LATE_S = 0.002
MARKS = ("<!-- fault table: begin -->", "<!-- fault table: end -->")
STS_ANSWER = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>
<SessionToken></SessionToken><Expiration>{expires}</Expiration></Credentials>
<AssumedRoleUser><Arn>arn:aws:sts::1:assumed-role/kv/x</Arn><AssumedRoleId>A:x</AssumedRoleId></AssumedRoleUser>
</AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"""
IDENTITY = Identity.of({"benchmark": BLOCK})  # identity of a rig's client


class Sts:
    """STS in this process: exchanges any token for the credentials of the environment.

    :param validity_s: validity of the credentials; requests wait for new ones in their last minute.
    """

    def __init__(self, validity_s: float) -> None:
        self.hangs = False
        self._end = threading.Event()
        owner, ended = self, self._end
        access = {
            name: os.environ[name]
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        }

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                if owner.hangs:
                    ended.wait()
                    return
                expires = datetime.now(UTC) + timedelta(seconds=validity_s)
                body = STS_ANSWER.format(
                    key=access["AWS_ACCESS_KEY_ID"],
                    secret=access["AWS_SECRET_ACCESS_KEY"],
                    expires=expires.strftime("%Y-%m-%dT%H:%M:%SZ"),
                ).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._directory = tempfile.TemporaryDirectory()
        self._token = Path(self._directory.name, "token")
        self._token.write_text("token of the pod")

    @contextmanager
    def environment(self) -> Iterator[None]:
        """Let processes that start meanwhile have no other credentials."""
        values = {
            "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/kv",
            "AWS_WEB_IDENTITY_TOKEN_FILE": str(self._token),
            "AWS_ENDPOINT_URL_STS": f"http://127.0.0.1:{self._server.server_address[1]}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        }
        with mock.patch.dict(os.environ, values):
            for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
                os.environ.pop(name, None)
            yield

    def close(self) -> None:
        self._end.set()
        self._server.shutdown()
        self._server.server_close()
        self._directory.cleanup()


class World(NamedTuple):
    """Server, proxy and bucket that a fault applies to."""

    endpoint: str
    proxy: FaultProxy
    bucket: str
    client: S3Client
    ceph: str | None
    """Directory of a Ceph server that may be killed."""
    sts: Sts | None = None
    """Source of the engine's credentials; None: the environment."""

    @property
    def url(self) -> str:
        """URL of the store that bypasses the proxy."""
        return f"s3://{self.bucket}/store?endpoint_url={self.endpoint}&cache=no"


class Fault(NamedTuple):
    """A fault: its start and its end."""

    name: str
    begin: Callable[[World], None]
    end: Callable[[World], None]
    trips: bool = True
    """Whether the breaker must open."""
    needs_ceph: bool = False
    sts_validity_s: float | None = None
    """Validity of credentials from an STS; None: they are in the environment."""
    notice_s: float = 0.0
    """Time after the end of the fault in which the engine notices its consequences."""


def through_proxy(name: str, mode: str, *, trips: bool = True) -> Fault:
    return Fault(
        name,
        lambda world: world.proxy.set(mode),
        lambda world: world.proxy.set("ok"),
        trips,
    )


def ceph(world: World, action: str) -> None:
    # a pipe would never reach its end, because the daemons inherit it
    log = subprocess.DEVNULL
    subprocess.run(
        ["bash", str(SERVERS / "ceph.sh"), action],
        stdout=log,
        stderr=log,
        check=True,
        timeout=180,
    )


def start_server(world: World) -> None:
    ceph(world, "start")
    wait_for_port(urlsplit(world.endpoint).port or 80)


def revoke(world: World) -> None:
    _user(world, "suspend") if world.ceph else world.proxy.set("deny")


def allow(world: World) -> None:
    _user(world, "enable") if world.ceph else world.proxy.set("ok")


def _user(world: World, action: str) -> None:
    environment = {**os.environ, "CEPH_CONF": f"{world.ceph}/ceph.conf"}
    command = ["radosgw-admin", "user", action, "--uid=test"]
    log = subprocess.DEVNULL
    subprocess.run(
        command, env=environment, stdout=log, stderr=log, check=True, timeout=120
    )


def hang_sts(world: World) -> None:
    assert world.sts is not None
    world.sts.hangs = True


def end_sts_hang(world: World) -> None:
    assert world.sts is not None
    world.sts.hangs = False


def forbid_one_pack(world: World) -> None:
    """Let the server refuse one object, which holds the first pack in the order of names."""
    found = retry(lambda: world.client.list_objects_v2(Bucket=world.bucket)["Contents"])
    key = next(entry["Key"] for entry in found if "/packs/" in entry["Key"])
    world.proxy.set(f"forbid {re.escape(key)}")


def delete_bucket(world: World) -> None:
    """Delete the bucket. The proxy cuts off the engine meanwhile, since new objects would prevent
    the deletion."""
    world.proxy.set("rst")
    retry(lambda: _empty_and_delete(world))
    world.proxy.set("ok")


def _empty_and_delete(world: World) -> None:
    for page in world.client.get_paginator("list_objects_v2").paginate(
        Bucket=world.bucket
    ):
        objects: list[ObjectIdentifierTypeDef] = [
            {"Key": entry["Key"]} for entry in page.get("Contents", ())
        ]
        if objects:
            world.client.delete_objects(
                Bucket=world.bucket, Delete={"Objects": objects, "Quiet": True}
            )
    world.client.delete_bucket(Bucket=world.bucket)


def create_bucket(world: World) -> None:
    retry(lambda: world.client.create_bucket(Bucket=world.bucket))


def retry(call: Callable[[], T]) -> T:
    """Call a function until it succeeds, for at most ``PATIENCE_S``; return its result."""
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except (BotoCoreError, ClientError):
            if time.monotonic() > until:
                raise
        time.sleep(0.2)


FAULTS = [
    through_proxy("server hangs", "hang"),
    through_proxy("hang after the commit", "hang_reply"),
    through_proxy("reset", "rst"),
    through_proxy("reset in the middle of a body", "rst_after 100000", trips=False),
    through_proxy("lost reply", "lose_reply"),
    through_proxy("503 storm", "s503 1000000"),
    through_proxy("slow body", "rate 20000"),
    Fault(
        "server killed with -9 during uploads",
        lambda world: ceph(world, "kill9"),
        start_server,
        needs_ceph=True,
    ),
    # refusals say nothing about the server
    Fault("credentials revoked", revoke, allow, trips=False),
    Fault(
        "STS hangs, credentials are valid",
        hang_sts,
        end_sts_hang,
        trips=False,
        sts_validity_s=3600.0,
    ),
    Fault("STS hangs, credentials expire", hang_sts, end_sts_hang, sts_validity_s=62.0),
    through_proxy("DELETE refused", "forbid ^(DELETE|POST)", trips=False),
    Fault(
        "one object forbidden",
        forbid_one_pack,
        lambda world: world.proxy.set("ok"),
        trips=False,
    ),
    through_proxy("Date a year ahead", f"date {YEAR_S}", trips=False),
    through_proxy("Date a year back", f"date -{YEAR_S}", trips=False),
    # a missing bucket is a refusal; only the connections that are cut before may open the breaker
    Fault(
        "bucket deleted and created again",
        delete_bucket,
        create_bucket,
        trips=False,
        notice_s=75.0,
    ),
]


class LogCounts(logging.Handler):
    """Counts of events in the log of the host process."""

    def __init__(self) -> None:
        super().__init__()
        self.opened = self.closed = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.opened += "requests are held back" in text
        self.closed += text.endswith("/store answers again")


class Quantiles(NamedTuple):
    """Quantiles of durations, in seconds."""

    median: float = 0.0
    p99: float = 0.0

    @classmethod
    def of(cls, durations: Sequence[float]) -> Quantiles:
        return cls(percentile(durations, 0.5), percentile(durations, 0.99))

    def __str__(self) -> str:
        return f"{1e3 * self.median:.2f}, {1e3 * self.p99:.1f}"


class Outcome(NamedTuple):
    """Result of one fault: a row of the table."""

    fault: str
    misses: int
    """Requested blocks that were not loaded during the fault."""
    wrong: int
    missing: int
    twice: int
    opened: int
    closed: int
    calls_s: tuple[Quantiles, Quantiles]
    """Time that the engine's calls take in a tick: without the fault, with it."""
    waits_s: tuple[float, float]
    """Longest load, in seconds: without the fault, with it."""
    problem: str
    """Empty if the result is as required."""

    @property
    def cells(self) -> list[str]:
        before, during = self.calls_s
        held = "yes" if during.p99 - before.p99 <= MOST_LATE_S else "no"
        breaker = f"{self.opened} / {self.closed}"
        counts = [self.misses, self.wrong, self.missing, self.twice]
        late = f"{before} / {during} ms: {held}"
        name = f"{self.fault}: {self.problem}" if self.problem else self.fault
        waits = f"{self.waits_s[0]:.2f} / {self.waits_s[1]:.2f} s"
        return [name, *map(str, counts), breaker, late, waits]


COLUMNS = [
    "fault",
    "misses meanwhile",
    "wrong",
    "missing",
    "twice",
    "breaker opened / closed",
    f"engine's calls, median and p99, before / during: p99 + {MOST_LATE_S * 1e3:g} ms at most",
    "longest load before / during",
]


def check(world: World, load: Load) -> tuple[int, int, int]:
    """Read all content with a new handle that bypasses the proxy.

    :returns: durable blocks that are missing, wrong blocks, blocks stored twice.
    """
    backend = S3Backend.open(StoreUrl.parse(world.url))
    (namespace,) = [found.id for found in backend.namespaces()]
    holders: Counter[bytes] = Counter()
    wrong = 0
    backend.changes(namespace, None)
    wait_until_merged(backend, world.client, world.bucket)
    tables = list(backend.changes(namespace, None).added)
    for table in tables:
        keys = table.keys.unpack()
        holders.update(keys)
        payload = np.zeros((len(keys), BLOCK), np.uint8)
        if backend.read(
            namespace, [ReadSpan(table.pack_id, 0, [payload.data.cast("B")])]
        ) != [True]:
            holders.subtract(keys)
            continue
        blocks = zip(payload, keys, strict=True)
        wrong += sum(
            not np.array_equal(block, load.contents.of(key)) for block, key in blocks
        )
    missing = sum(holders[key] < 1 for key in load.durable)
    twice = sum(count > 1 for count in holders.values())
    backend.close()
    return missing, wrong, twice


def open_client(world: World, rig: Rig, options: str) -> StoreClient:
    where = (
        f"s3://{world.bucket}/store?endpoint_url=http://127.0.0.1:{world.proxy.port}"
    )
    client = rig.client(f"{where}&{COMMON}&{options}", max_age_s=0.2, events=True)
    with nullcontext() if world.sts is None else world.sts.environment():
        client.open()
    return client


def try_fault(world: World, fault: Fault, seconds: float) -> Outcome:
    """Run one fault. Return its row of the table."""
    log_counts = LogCounts()
    log = logging.getLogger("persistkv")
    log.addHandler(log_counts)
    rig = Rig(ROWS, BLOCK)
    load = Load(open_client(world, rig, PROMPT), rig)
    try:
        load.run(1.0)
        load.waits.clear()
        before = load.run(seconds)
        longest_before = max(load.waits, default=0.0)
        missed_before = load.missed
        fault.begin(world)
        load.waits.clear()
        during = load.run(seconds)
        longest_during = max(load.waits, default=0.0)
        misses = load.missed - missed_before
        fault.end(world)
        load.idle(fault.notice_s)
        load.recover()
    finally:
        load.client.close()
        log.removeHandler(log_counts)
    missing, wrong, twice = check(world, load)
    calls = (Quantiles.of(before), Quantiles.of(during))
    counts = (
        misses,
        wrong + load.wrong,
        missing,
        twice,
        log_counts.opened,
        log_counts.closed,
    )
    found = Outcome(fault.name, *counts, calls, (longest_before, longest_during), "")
    problem = problem_of(found, fault)
    if not load.loaded:
        problem = "NO: nothing was loaded"
    lacking = sum(map(len, load.not_durable()))
    if lacking and not problem:
        problem = f"NO: {lacking} blocks were not stored again"
    return found._replace(problem=problem)


def problem_of(found: Outcome, fault: Fault) -> str:
    """Return the first problem of a result, or an empty string."""
    if found.wrong or found.missing or found.twice:
        return "NO: blocks"
    if found.opened != found.closed or (fault.trips and not found.opened):
        return "NO: breaker"
    return ""


def try_all(
    endpoint: str,
    seconds: float,
    only: Sequence[str],
    ceph: str | None,
) -> list[Outcome]:
    """Run all faults. A run that raises is a row with a problem."""
    outcomes: list[Outcome] = []
    client = plain_client(endpoint)
    for fault in FAULTS:
        if not any(part in fault.name for part in only) or (
            fault.needs_ceph and not ceph
        ):
            continue
        proxy = FaultProxy(urlsplit(endpoint).port or 80)
        sts = None if fault.sts_validity_s is None else Sts(fault.sts_validity_s)
        try:
            world = World(endpoint, proxy, make_bucket(endpoint), client, ceph, sts)
            outcomes.append(try_fault(world, fault, seconds))
        except Exception as error:
            traceback.print_exc()
            outcomes.append(
                Outcome(
                    fault.name,
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    (Quantiles(), Quantiles()),
                    (0.0, 0.0),
                    f"NO: {type(error).__name__}",
                )
            )
        finally:
            proxy.close()
            if sts is not None:
                sts.close()
        sys.stderr.write(" · ".join(outcomes[-1].cells) + "\n")
    client.close()
    return outcomes


def table_of(outcomes: list[Outcome], seconds: float, where: str) -> str:
    """Return the table as Markdown."""
    load = os.getloadavg()[1]  # of five minutes: other programs delay this one
    rows = [COLUMNS, ["---"] * len(COLUMNS), *(outcome.cells for outcome in outcomes)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(
        [
            *lines,
            "",
            f"{where}, each fault for {seconds:g} s. {machine()}, load average {load:.0f}.",
        ]
    )


def put_into(page: Path, table: str) -> None:
    """Replace the text between the marks of a page."""
    text = page.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    page.write_text(f"{text[:begin]}\n{table}\n{text[end:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--endpoint")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="duration of a fault, and of the time before it",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[""],
        help="run only faults whose name contains one of these texts",
    )
    parser.add_argument(
        "--into",
        type=Path,
        help="a page with marks; the table replaces the text between them",
    )
    arguments = parser.parse_args()
    logging.getLogger("persistkv").propagate = False
    found = os.environ.get("PERSISTKV_S3_CEPH") if arguments.endpoint else None
    with server(arguments.endpoint) as endpoint:
        outcomes = try_all(endpoint, arguments.seconds, arguments.only, found)
    where = (
        "moto"
        if arguments.endpoint is None
        else "Ceph"
        if found
        else arguments.endpoint
    )
    table = table_of(outcomes, arguments.seconds, where)
    sys.stdout.write(f"{table}\n")
    if arguments.into is not None:
        put_into(arguments.into, table)
    return 1 if any(outcome.problem for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
