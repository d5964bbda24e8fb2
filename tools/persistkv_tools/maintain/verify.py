"""``persistkv verify``: reads a store, checks everything in it, and deletes bad packs with
``--repair``.

1. A bad pack is checked again before it is deleted. If the store changes between this check and the
   commit, the commit has no effect, and both are repeated.
2. Requests that name the pack are shortened first: their manifests keep only the blocks before it.
   A request with no block left is deleted together with the pack. Blocks behind the pack stay in
   the store. Lookups reach them again as soon as an engine has computed and stored the pack's
   blocks again.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from argparse import ArgumentParser, ArgumentTypeError
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.progress import Progress

from persistkv.batches import batched
from persistkv.config import parse_size
from persistkv.errors import ConfigurationError, StoreError
from persistkv.storage.backend import Backend, CommitBatch
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.format.pack import PackTable
from persistkv.storage.host.status import read_statuses
from persistkv.storage.inspection.handle import StoreHandle, open_store
from persistkv.storage.inspection.pack_tables import NamespacePacks, all_keys
from persistkv.storage.store.manifests import (
    SHORTENED_AT_ONCE,
    read_requests,
    shortening_batch,
)
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    add_flag,
    add_shared,
    confirm,
    ensure_consent,
)
from persistkv_tools.maintain.integrity import (
    Tally,
    Verifier,
    VerifyState,
    check_manifests,
    count_rows,
    packs_left,
    read_catalogues,
)
from persistkv_tools.packs import BATCH_BYTES, Defect, check_pack
from persistkv_tools.progress import Throttle, byte_progress, counted

_SAVE_S = 5.0  # least time between two writes of the progress file
_PORTION_BYTES = 1 << 30  # 1 GiB
"""Most payload bytes of a portion, after which the progress is saved."""
_BOUNDED_PORTION_BYTES = 64 << 20  # 64 MiB
"""The same if the pace is limited, which makes portions take longer."""
_BOUNDED_BATCH_BYTES = 1 << 20  # 1 MiB
"""Most bytes of one read if the pace is limited: reads of an engine wait only for small ones."""
_SHARE_BESIDE_ENGINES = 0.05
"""Largest share of the time that reads take while engines use the store."""
_THREADS = 4  # that read and check ahead if the pace is not limited
_SWITCH_S = 0.0002
"""For how long a thread waits for the GIL before it asks the running thread to release it."""
_SHOWN = 20  # rows of a table
_ATTEMPTS = 100
"""Most times that a pack is checked and deleted again, because another process has committed in
between."""


class Summary(Tally, kw_only=True):
    """Result of one run of ``persistkv verify``: totals, findings and repairs."""

    url: str
    sample: float
    """Random share of the packs that the run had to read, above 0 and up to 1."""
    seconds: float
    """Duration of this run in seconds, without the interrupted runs that it resumed."""
    resumed_packs: int
    """Part of ``packs`` that interrupted runs had read before this run resumed them."""
    resumed_bytes: int
    """Part of ``stored_bytes`` that interrupted runs had read before this run resumed them."""
    requests: int
    rows_counted: bool
    """False: unreadable catalogue rows could not be counted, because other processes wrote during
    each attempt."""
    beside_engines: int
    """Number of live engines of the store. If above 0 and no --rate is given, reading is limited to
    5 % of the time."""
    problems: int
    """Number of defects in ``findings``; a finding may count several."""
    by_problem: dict[str, int]
    """Number of defects of each kind."""
    deleted_packs: int = 0
    """Number of bad packs that --repair deleted."""
    shortened_requests: int = 0
    """Number of requests that named bad packs, and whose manifests now keep only the blocks before
    these."""
    deleted_requests: int = 0
    """Number of requests that were deleted because no block was left before the bad pack."""
    repair: RepairPlan | None = None
    """Plan of --repair; null without --repair, or if no pack is bad."""


class PlannedPack(msgspec.Struct, frozen=True):
    """A bad pack that --repair is to delete."""

    namespace: str
    pack: str
    blocks: int
    stored_bytes: int


class PlannedRequest(msgspec.Struct, frozen=True):
    """A request that names bad packs, and how much of it a repair keeps."""

    namespace: str
    request: str
    blocks: int
    """Blocks of the request before the repair."""
    kept_blocks: int
    """Blocks before the first bad pack. 0: the request is to be deleted."""


class RepairPlan(msgspec.Struct):
    """Bad packs to delete, and the requests to shorten or delete with them."""

    packs: list[PlannedPack] = []
    requests: list[PlannedRequest] = []
    blocks: int = 0
    """Number of blocks in the packs to delete."""
    stored_bytes: int = 0


class Repaired(msgspec.Struct):
    """Ids of the packs and requests that a repair has deleted or shortened so far, updated after
    each commit."""

    packs: list[bytes] = []
    """Ids of the packs that the repair has deleted."""
    shortened: set[tuple[bytes, str]] = set()
    """(namespace id, request id) of requests that keep the blocks before a bad pack."""
    deleted: set[tuple[bytes, str]] = set()
    """(namespace id, request id) of requests that were deleted, because no block was left."""


class _Pace(NamedTuple):
    """Speed of a run, and the sizes of its reads."""

    throttle: Throttle
    threads: int
    """Threads that read and check ahead; 0: none."""
    portion_bytes: float
    """Most payload bytes between two updates of the progress."""
    batch_bytes: int
    """Most bytes of one read."""

    @classmethod
    def choose(
        cls,
        bytes_per_s: int | None,
        *,
        beside_engines: bool,
        resumable: bool,
    ) -> _Pace:
        """Return the pace of a run.

        :param bytes_per_s: the user's limit; None: none is given.
        :param beside_engines: whether engines use the store.
        :param resumable: whether the progress is saved.
        """
        share = 1.0
        # a limit that the user gives replaces the one that protects engines
        if beside_engines and bytes_per_s is None:
            share = _SHARE_BESIDE_ENGINES
        throttle = Throttle(bytes_per_s, share=share)
        if throttle.bounded:
            # use no threads: they would read ahead of the thread that the throttle slows down
            pace = cls(
                throttle,
                threads=0,
                portion_bytes=_BOUNDED_PORTION_BYTES,
                batch_bytes=_BOUNDED_BATCH_BYTES,
            )
        else:
            pace = cls(
                throttle,
                threads=_THREADS,
                portion_bytes=_PORTION_BYTES,
                batch_bytes=BATCH_BYTES,
            )
        # portions are limited only for the sake of saving: progress is saved after each one
        if not resumable:
            return pace._replace(portion_bytes=math.inf)
        return pace


_PACKS = render.columns("pack namespace blocks size=stored_bytes")
_REQUESTS = render.columns("request blocks kept=kept_blocks")
_FINDINGS = render.columns(
    "problem pack_or_request=where namespace=space detail",
    problem=lambda finding: finding.problem.value,
    where=lambda finding: (finding.pack or "")[:8] or finding.request or "-",
    space=lambda finding: (finding.namespace or "")[:8],
)


def verify(
    url: str,
    *,
    sample: float,
    rate: str | None,
    repair: bool,
    yes: bool,
    resume: Path | None,
    json: bool,
) -> None:
    """Read a whole store and check every byte. While engines use the store, reads take at most 5 %
    of the time; --rate sets another limit.

    Exit code 1: damage was found, even if it was repaired. Exit code 3: a commit of --repair
    failed; earlier commits stay in effect and are shown.

    Example: persistkv verify lmdb:///var/cache/kv --rate 200MiB --resume /var/tmp/kv.verify
    """
    if repair:
        ensure_consent("verify --repair", "--yes", yes=yes, json=json)
    bytes_per_s = None if rate is None else parse_size(rate, name="--rate")
    failure = None
    with open_store(url, read_only=not repair) as store:
        with byte_progress() as progress:
            summary = check_store(
                store, sample=sample, rate=rate, resume=resume, progress=progress
            )
        if repair:
            summary, failure = _repair(store, summary, yes=yes, json=json)
    # the run is complete: without the progress file, the next run starts from the beginning
    if resume is not None:
        resume.unlink(missing_ok=True)
    if json:
        render.print_json(summary)
    else:
        _print(summary, bytes_per_s)
    if failure is not None:
        raise failure
    if summary.problems:
        raise SystemExit(1)


def _repair(
    store: StoreHandle,
    summary: Summary,
    *,
    yes: bool,
    json: bool,
) -> tuple[Summary, StoreError | None]:
    """Show the plan, ask, and delete bad packs. Return the summary with the repairs, and the
    error that ended the repair, if there was one."""
    bad = [finding for finding in summary.findings if finding.pack]
    if not bad:
        return summary, None
    plan = plan_repair(store.backend, bad)
    repaired = Repaired()
    failure = None
    if plan.packs and _consents(plan, yes=yes, json=json):
        try:
            # ``repaired`` counts each commit, so it is right also if a later commit fails
            repair_packs(store.writable(), bad, repaired)
        except StoreError as error:
            failure = error
    done = msgspec.structs.replace(
        summary,
        repair=plan,
        deleted_packs=len(repaired.packs),
        shortened_requests=len(repaired.shortened),
        deleted_requests=len(repaired.deleted),
    )
    return done, failure


def _consents(
    plan: RepairPlan,
    *,
    yes: bool,
    json: bool,
) -> bool:
    """Show the plan, and return whether the user consents to it; ask, unless ``yes``."""
    if not json:
        _print_plan(plan)
    packs = render.count(len(plan.packs), "bad pack")
    question = f"Delete {packs}, and shorten the requests that use them?"
    return yes or confirm(question)


def _share(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        problem = f"{text!r} is not valid; expected a share such as 0.05"
        raise ArgumentTypeError(problem) from None


def _add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--sample",
        metavar="SHARE",
        type=_share,
        default=1.0,
        help="Read only a random share of the packs, e.g. 0.05.",
    )
    add_shared(parser, "--rate")
    add_flag(
        parser, "--repair", "Delete bad packs; requests keep the blocks before them."
    )
    add_shared(parser, "--yes")
    parser.add_argument(
        "--resume",
        metavar="FILE",
        type=Path,
        help="Save progress in this file, and resume from it. Deleted at the end.",
    )


COMMAND = Command(verify, (URL,), _add_options)


def check_store(
    store: StoreHandle,
    *,
    sample: float = 1.0,
    rate: str | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Read the store and check every byte. If engines use it and ``rate`` is None, reads take 5 %
    of the time at most.

    :param sample: random share of the packs to read, above 0 and up to 1.
    :param rate: bytes to read in a second at most, e.g. ``200MiB``.
    :param resume: file of the progress. A run that was interrupted resumes from it; the caller
        deletes it.
    :param progress: display that shows the progress.
    :raises ConfigurationError: the sample or rate is invalid, or the file is of another run or
        cannot be written.
    """
    backend = store.backend
    bytes_per_s = None if rate is None else parse_size(rate, name="rate")
    if not 0 < sample <= 1:
        raise ConfigurationError("--sample", sample, "a share above 0 and up to 1")
    state = _begin_state(store.url, sample, resume)
    begin = time.monotonic()
    resumed_packs = state.packs
    resumed_bytes = state.stored_bytes
    num_engines = _count_engines(backend)
    pace = _Pace.choose(
        bytes_per_s,
        beside_engines=num_engines > 0,
        resumable=resume is not None,
    )

    namespaces = read_catalogues(backend)
    packs = packs_left(namespaces, state)
    total_bytes = sum(pack.table.payload_length for pack in packs)
    on_bytes = counted(progress, "verify", total_bytes, pace.throttle)
    verifier = Verifier(
        backend,
        packs,
        state,
        on_bytes,
        threads=pace.threads,
        portion_bytes=pace.portion_bytes,
        batch_bytes=pace.batch_bytes,
    )
    with closing(verifier), _fast_thread_switches():
        # start the reading threads first: they read packs while this one counts rows and reads
        # requests
        verifier.begin()
        row_findings = count_rows(backend, namespaces)
        num_requests, request_findings = check_manifests(backend, namespaces, on_bytes)
        _read_packs(verifier, state, resume)

    rows_counted = row_findings is not None
    findings = [*(row_findings or []), *request_findings, *state.findings]
    by_problem = _count_problems(findings)
    return render.view_of(
        Summary,
        state,
        url=store.url,
        seconds=round(time.monotonic() - begin, 3),
        resumed_packs=resumed_packs,
        resumed_bytes=resumed_bytes,
        requests=num_requests,
        rows_counted=rows_counted,
        beside_engines=num_engines,
        problems=sum(by_problem.values()),
        by_problem=dict(by_problem),
        findings=findings,
    )


def _count_engines(backend: Backend) -> int:
    """Return the number of live engines of the store."""
    now = time.time()
    return sum(status.is_live(now) for status in read_statuses(backend))


def _count_problems(findings: Iterable[Defect]) -> Counter[str]:
    """Return the number of defects of each kind; a finding may count several."""
    counts = Counter[str]()
    for finding in findings:
        counts[finding.problem.value] += finding.count
    return counts


def _begin_state(
    url: str,
    sample: float,
    resume: Path | None,
) -> VerifyState:
    """Return the state of a new run, or that of an interrupted one."""
    if resume is None:
        return VerifyState.begin(url, sample)
    state = VerifyState.load(resume, url, sample)
    # write the file now: if that fails, the run ends before it has read for an hour
    state.save(resume)
    return state


@contextmanager
def _fast_thread_switches() -> Iterator[None]:
    """Let reading threads wait less for the GIL than the default of up to 5 ms after each read, and
    exclude present objects, such as pack tables, from garbage collection.
    """
    usual_interval = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_S)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        sys.setswitchinterval(usual_interval)


def _read_packs(
    verifier: Verifier,
    state: VerifyState,
    resume: Path | None,
) -> None:
    """Read all packs; save the state every few seconds, and at the end, also after an error.

    :param state: progress of the verifier.
    :param resume: file to save the state in; None: it is not saved.
    """
    saved_at = time.monotonic()
    try:
        # each iteration reads one portion, and updates ``state``
        for _ in verifier.packs():
            unsaved_s = time.monotonic() - saved_at
            if resume is not None and unsaved_s > _SAVE_S:
                state.save(resume)
                saved_at = time.monotonic()
    finally:
        if resume is not None:
            state.save(resume)


def _print_plan(plan: RepairPlan) -> None:
    """Print the packs to delete, and the requests that become shorter or are deleted with them."""
    render.show_table(
        _PACKS, plan.packs, title="bad packs to delete", left="namespace", most=_SHOWN
    )
    if plan.requests:
        title = (
            "requests that use these packs, and the blocks that they keep (0: the request "
            "is deleted)"
        )
        render.show_table(_REQUESTS, plan.requests, title=title, most=_SHOWN)
    num_shortened = sum(row.kept_blocks > 0 for row in plan.requests)
    packs = render.count(len(plan.packs), "pack")
    blocks = render.count(plan.blocks, "block")
    size = render.format_size(plan.stored_bytes)
    deleted = render.count(len(plan.requests) - num_shortened, "request")
    shortened = render.count(num_shortened, "request")
    render.say(
        f"to delete: {packs}, {blocks}, {size}, and {deleted}; to shorten: {shortened}"
    )


def _print_reads(summary: Summary, bytes_per_s: int | None) -> None:
    """Print how much was read, and how fast."""
    # the duration is that of this run alone, so the bytes must be, too
    read_bytes = summary.stored_bytes - summary.resumed_bytes
    speed = "-"
    if summary.seconds:
        speed = render.format_size(int(read_bytes / summary.seconds))
    packs = render.count(summary.packs, "pack")
    size = render.format_size(summary.stored_bytes)
    requests = render.count(summary.requests, "request")
    render.say(
        f"read {packs} ({size}) and {requests} in {summary.seconds:.1f} s ({speed}/s)"
    )
    if summary.resumed_packs:
        packs = render.count(summary.resumed_packs, "pack")
        earlier = f"{packs} ({render.format_size(summary.resumed_bytes)})"
        render.say(f"this includes {earlier} that earlier, interrupted runs read")
    if summary.beside_engines:
        bound = "5 % of the time"
        if bytes_per_s is not None:
            bound = f"{render.format_size(bytes_per_s)}/s"
        engines = render.count(summary.beside_engines, "engine")
        render.say(f"reads were limited to {bound}; {engines} used the store")


def _print_unchecked(summary: Summary) -> None:
    """Print what could not be checked, or not to the end."""
    if summary.went_meanwhile:
        packs = render.count(summary.went_meanwhile, "pack")
        render.say(f"no problem: {packs} deleted or replaced while verify read")
    if summary.other_release_packs:
        packs = render.count(summary.other_release_packs, "pack")
        render.say(f"not checked, of another release's codec: {packs}")
    if not summary.rows_counted:
        render.say(
            "unreadable catalogue rows could not be counted: other processes wrote continuously"
        )


def _print(summary: Summary, bytes_per_s: int | None) -> None:
    """Print the findings, the amount read, and the repairs."""
    if summary.findings:
        render.show_table(
            _FINDINGS,
            summary.findings,
            left="pack or request,namespace,detail",
            most=_SHOWN,
        )
    _print_reads(summary, bytes_per_s)
    _print_unchecked(summary)
    if summary.deleted_packs or summary.shortened_requests:
        packs = render.count(summary.deleted_packs, "pack")
        render.say(f"deleted {packs}; engines compute the lost blocks again")
        render.say(
            f"requests: {summary.shortened_requests:,} shortened to the blocks before the bad "
            f"packs, {summary.deleted_requests:,} deleted, because no block was left"
        )
    if summary.problems:
        render.say(f"found {render.count(summary.problems, 'problem')}")
    else:
        render.say("no problems found")


def plan_repair(backend: Backend, findings: Iterable[Defect]) -> RepairPlan:
    """Return the packs of ``findings`` that the store still holds, and the requests that name
    them."""
    plan = RepairPlan()
    bad = {bytes.fromhex(found.pack) for found in findings if found.pack}
    for held_packs in read_catalogues(backend):
        # no pack is in two namespaces, because its id is a digest that covers the namespace
        packs_to_delete = sorted(bad & held_packs.tables.keys())
        if packs_to_delete:
            _plan_namespace(backend, held_packs, packs_to_delete, plan)
    return plan


def _plan_namespace(
    backend: Backend,
    held_packs: NamespacePacks,
    packs_to_delete: Sequence[bytes],
    plan: RepairPlan,
) -> None:
    """Add the bad packs of one namespace to the plan, and the requests that name them."""
    name = held_packs.namespace.hex()
    for pack_id in packs_to_delete:
        table = held_packs.tables[pack_id]
        planned_pack = PlannedPack(
            namespace=name,
            pack=pack_id.hex(),
            blocks=len(table.keys),
            stored_bytes=table.payload_length,
        )
        plan.packs.append(planned_pack)
        plan.blocks += planned_pack.blocks
        plan.stored_bytes += planned_pack.stored_bytes
    # prepare the commits of the repair, whose manifests show the blocks that each request keeps
    for heads, batch in _shortenings(backend, held_packs, packs_to_delete):
        shortened_heads = [write.manifest for write in batch.manifests]
        blocks_kept = {head.id: head.blocks for head in shortened_heads}
        for head in heads:
            # the batch leaves out requests that keep no block
            planned_request = PlannedRequest(
                namespace=name,
                request=head.id,
                blocks=head.blocks,
                kept_blocks=blocks_kept.get(head.id, 0),
            )
            plan.requests.append(planned_request)


def repair_packs(
    backend: Backend,
    findings: Iterable[Defect],
    done: Repaired,
) -> None:
    """Delete the packs of ``findings`` that are still bad, and shorten the requests that name them;
    each commit updates ``done``.

    :raises StoreError: a commit failed, or other processes wrote during each attempt; earlier
        commits stay in effect.
    """
    bad: set[tuple[str, str]] = set()
    for found in findings:
        if found.namespace and found.pack:
            bad.add((found.namespace, found.pack))
    for held_packs in read_catalogues(backend):
        for namespace, pack in sorted(bad):
            if namespace == held_packs.namespace.hex():
                _delete_if_bad(backend, held_packs, bytes.fromhex(pack), done)


def _delete_if_bad(
    backend: Backend,
    held_packs: NamespacePacks,
    pack_id: bytes,
    done: Repaired,
) -> None:
    """Delete a pack that was found bad, and shorten the requests that name it, unless it is good or
    gone meanwhile. All steps are repeated if other processes write between the reading and the
    commits."""
    for _ in range(_ATTEMPTS):
        held_packs.refresh()
        table = held_packs.tables.get(pack_id)
        # an engine may have deleted or replaced the pack since it was found bad
        if table is None or not check_pack(backend, table):
            return
        # shorten requests first, because the deletion of the pack deletes those that still name it
        shortening = _shorten_requests(backend, held_packs, pack_id, done)
        if shortening is None:
            continue
        deletion = CommitBatch(bad=[pack_id], seen=shortening.cursor)
        result = backend.commit(held_packs.namespace, deletion)
        # another process has written: the pack may have been replaced by a good one
        if result.stale:
            continue
        done.packs.append(pack_id)
        # a deleted request no longer counts as shortened because of another bad pack
        done.shortened -= shortening.to_delete
        done.deleted |= shortening.to_delete
        return
    reason = f"other processes wrote during all {_ATTEMPTS} attempts"
    raise StoreError(f"pack {pack_id.hex()} could not be deleted: {reason}")


class _Shortening(NamedTuple):
    """The requests that name a bad pack were shortened."""

    cursor: bytes | None
    """Position in the changes of the namespace behind the commits of the shortening."""
    to_delete: set[tuple[bytes, str]]
    """(namespace id, request id) of requests that have no block before the bad pack. They still
    name it, and are deleted with it."""


def _shorten_requests(
    backend: Backend,
    held_packs: NamespacePacks,
    pack_id: bytes,
    done: Repaired,
) -> _Shortening | None:
    """Shorten the requests that name a bad pack to the blocks before it, and count them in
    ``done``. None: other processes wrote since ``held_packs`` was refreshed."""
    name = held_packs.namespace
    cursor = held_packs.cursor
    to_delete: set[tuple[bytes, str]] = set()
    for heads, batch in _shortenings(backend, held_packs, [pack_id]):
        shorter = {(name, write.manifest.id) for write in batch.manifests}
        if shorter:
            # The cursor is that of this repair's last commit, so only changes by other processes
            # make the commit stale. A stale commit has no effect.
            result = backend.commit(name, replace(batch, seen=cursor))
            if result.stale:
                return None
            cursor = result.cursor
        done.shortened |= shorter
        # the other requests keep no block
        named = {(name, head.id) for head in heads}
        to_delete |= named - shorter
    return _Shortening(cursor, to_delete)


def _shortenings(
    backend: Backend,
    held_packs: NamespacePacks,
    bad: Sequence[bytes],
) -> Iterator[tuple[Sequence[RequestManifest], CommitBatch]]:
    """Yield batches of the manifests that name ``bad`` packs, each with the commit that shortens
    them to the blocks before their first bad pack. The commit leaves out manifests that would keep
    no block, and has no cursor.
    """
    manifests = backend.catalogue(held_packs.namespace).manifests_naming(bad)
    all_tables = held_packs.tables.values()
    good = [table for table in all_tables if table.pack_id not in bad]
    for heads in batched(manifests, SHORTENED_AT_ONCE):
        requests = read_requests(backend, held_packs.namespace, heads)
        request_keys: set[bytes] = set()
        for request in requests:
            request_keys.update(all_keys(request.keys))
        # to save memory, keep only the good packs that hold blocks of these requests
        tables = _tables_with(good, request_keys)
        group_counts = [len(request.keys) for request in requests]
        num_groups = max(group_counts, default=0)
        # shortened manifests record their sizes, which follow from the block size of each group
        block_bytes = _block_bytes(tables, num_groups)
        pack_of = _packs_of_keys(tables)
        yield heads, shortening_batch(requests, pack_of, block_bytes, seen=None)


def _tables_with(
    tables: Iterable[PackTable],
    keys: set[bytes],
) -> list[PackTable]:
    """Return the tables that have at least one of the keys."""
    found: list[PackTable] = []
    for table in tables:
        if not keys.isdisjoint(table.keys.unpack()):
            found.append(table)
    return found


def _packs_of_keys(tables: Iterable[PackTable]) -> dict[bytes, bytes]:
    """Return the id of a pack for each key that these packs hold."""
    pack_of: dict[bytes, bytes] = {}
    for table in tables:
        keys = table.keys.unpack()
        pack_of.update(dict.fromkeys(keys, table.pack_id))
    return pack_of


def _block_bytes(tables: Iterable[PackTable], num_groups: int) -> list[int]:
    """Return the bytes of a block of each group; 0 for groups that no pack has."""
    sizes = [0] * num_groups
    for table in tables:
        for frame in table.frames:
            if frame.group < num_groups:
                sizes[frame.group] = frame.block_bytes
    return sizes
