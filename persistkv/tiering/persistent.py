"""The persistent tier: a thin, request-level adapter of a hosted store.

It translates jobs to messages for the store's host, answers of the host to job results, and
requests to manifests. The store (``persistkv.storage``) decides which blocks are stored, when, and
how.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from persistkv.base import (
    OffloadingEvent,
    OffloadKey,
    OffloadPolicy,
    ReqContext,
    RequestDescription,
    RequestOffloadingContext,
    StoredContext,
    get_offload_group_idx,
)
from persistkv.config import (
    OffloadingConfig,
    convert_options,
    parse_durability,
    parse_size,
)
from persistkv.errors import ConfigurationError, MissingOptionError
from persistkv.memory.budget import (
    BLOCKS_STAGED,
    MAX_IO_THREADS,
    MIN_STAGING_BYTES,
    default_io_threads,
)
from persistkv.storage.format.codec import parse_codec
from persistkv.storage.host.client import StoreClient
from persistkv.storage.host.hosts import Host, ProcessHost, ThreadHost
from persistkv.storage.host.in_flight import JobOutcome
from persistkv.storage.host.protocol import Hello, Saved
from persistkv.storage.identity import Identity
from persistkv.storage.records import Choice, LoadReport, RequestEnd, StoreOptions
from persistkv.tenants import DEFAULT_TENANT, UnnamedTenant
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager
from persistkv.tiering.load_cost import (
    LoadDecision,
    LoadPolicy,
    LoadTimes,
    Reason,
)
from persistkv.tiering.probing import PROBE_S, ProbeTimer

logger = logging.getLogger(__name__)

_NAP_S = 0.0005  # seconds between two polls of the host, in calls that wait
_MOST_PREFETCHES = 64
# number of ended requests whose persistence ``wait_persisted`` can still report
REMEMBERED_ENDS = 4_096
NO_TENANT = (
    "it names no tenant (kv_transfer_params.persistkv.tenant), and the tier's option tenant is "
    "required"
)
"""Why the option ``tenant`` refuses a request."""


class PersistentTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tier ``persistent``."""

    url: str
    """The store, e.g. ``lmdb:///var/cache/kv?capacity=100GiB``."""
    codec: str = "raw"
    """Codec of new packs."""
    host: Literal["process", "thread"] = "process"
    """Where the store's I/O runs: ``process`` (a host process) or ``thread`` (of the engine). If a
    host process is not possible, a warning is logged and a thread is used."""
    strict_identity: bool = False
    """True: the constructor raises IdentityMismatchError if the store contains only other
    identities. False: it adds a namespace for this identity."""
    adopt: Literal["canary", "never"] = "canary"
    """``canary``: the blocks of another engine release are used after they have proven equal to
    newly computed ones. If ``RowLayout.numbers`` is None, it is as ``never``. ``never``: each
    release computes its own blocks."""
    queue_bytes: int | str = "1GiB"
    """Bound on the raw bytes of store jobs in flight. A job that would exceed it fails, unless it
    is the only one."""
    staging_bytes: int | str = "256MiB"
    """Bound on all memory of the store's host beyond its index. At least 64 MiB, and at least the
    raw bytes of 32 blocks of the KV cache group with the largest blocks."""
    max_age_s: Annotated[float, msgspec.Meta(ge=0)] = 2.0
    """Seconds after which the write of staged blocks begins although their request has not ended;
    ignored if ``durability`` is an interval."""
    durability: str = "commit"
    """``commit``: packs of 4 MiB and more are written at once; in a local store, their blocks are
    durable when the store job ends. The write of smaller packs begins when their request ends, or
    after ``max_age_s``. ``interval:5s``: a write begins when the oldest waiting block is 5 s old. A
    crash of the host or the machine loses the blocks that are not written yet. See
    ``persistkv.config.parse_durability``."""
    io_threads: Annotated[int, msgspec.Meta(ge=1, le=MAX_IO_THREADS)] = msgspec.field(
        default_factory=default_io_threads
    )
    """Threads of the store's host that read, verify, encode and decode, in addition to the one that
    writes; 1 to 8. The default is 4 on a machine with 8 cores or more, otherwise 2. A remote store
    has always 8."""
    open_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    """Seconds, at least 1, to wait at construction for the store to open. After that, a host
    process continues to open it, and lookups miss until it is open; so does a thread, unless
    ``required`` is set: then the constructor raises HostError."""
    required: bool = False
    """Whether the constructor raises the error if the store cannot be opened at the start (busy, no
    permission, no such bucket, damaged). False: an error is logged, lookups miss and new blocks are
    dropped, and the opening is retried in the background. Mistakes in the configuration are always
    raised."""
    unique_request_ids: bool = False
    """Whether the engine's request ids are unique across restarts. If so, stored requests are
    listed under these ids, otherwise under generated ones."""
    watchdog_s: Annotated[float, msgspec.Meta(ge=1)] = 60.0
    """Seconds, at least 1, that the host process may send no message while an answer is due. Then
    it is killed, its jobs fail, and it is restarted. The limit is at least 60 until the store is
    open, and at most 2 while a load is due, because a request waits for it. A
    single call to the medium may take ten times the limit if the host answers pings."""
    load_policy: LoadPolicy = "auto"
    """``auto``: blocks are loaded if that is expected to be faster than computing them. ``always``:
    blocks are loaded whenever the store holds them. ``never``: blocks are stored only."""
    tenant: UnnamedTenant = "default"
    """Tenant of the requests that name none: ``default``, or ``required``: such requests neither
    use nor fill the store, and are counted as ``refused``."""
    load_deadline_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    """Most seconds, above 0, that a load may take. Blocks that are not read then are computed; a
    local store's reads in progress end first. With ``auto``, the deadline is the time of their
    computation if that is earlier."""


@dataclass
class _RequestBlocks:
    """Blocks that an unfinished request has stored and restored."""

    stored_keys: list[OffloadKey] = field(default_factory=list)
    """Only of a request without a description."""
    restored: Counter[int] = field(default_factory=Counter)
    """Number of blocks that it uses instead of computing them, by KV cache group."""


@dataclass
class _Load:
    """A load in flight."""

    job: JobMetadata
    is_abandoned: bool = False
    """Whether no request waits for it any more."""


class PersistentTier(SecondaryTierManager):
    """Secondary tier that stores the blocks of whole requests durably, so that they survive
    restarts of the engine. The store's host, usually a process, does the I/O.

    The constructor waits up to ``open_timeout_s`` seconds for the store. Later calls wait only if
    their description says so.

    :raises ConfigurationError: an option is invalid (the error names it), or ``config.identity`` is
        empty.
    :raises IdentityMismatchError: ``strict_identity`` is set and the store contains only other
        identities.
    :raises MissingExtraError: a package that the store's driver requires is not installed.
    :raises StoreError: ``required`` is set and the store cannot be opened.
    :raises HostError: ``required`` is set and the store's host does not start.
    """

    def __init__(
        self,
        config: OffloadingConfig,
        primary_kv_view: memoryview,
        **options: Any,
    ) -> None:
        super().__init__(config, primary_kv_view)
        if not config.identity:
            raise MissingOptionError(
                "the persistent tier",
                "an identity: all that tells this engine's KV from others",
            )
        self.options = convert_options(
            PersistentTierOptions, options, where="tier persistent"
        )
        hello = Hello(
            self.options.url,
            Identity.of(config.identity).encode(),
            config.layout,
            self._store_options(),
        )
        queue_bytes = parse_size(self.options.queue_bytes, name="queue_bytes")
        self.client = StoreClient(
            self._choose_host(),
            hello,
            max_queue_bytes=queue_bytes,
            watchdog_s=self.options.watchdog_s,
        )
        """Connection to the store's host: ``flush``, ``stats``, ``glance``, ``notices``. Its
        ``len`` is the number of blocks that lookups can find; a block in two packs counts twice."""
        self.client.open(self.options.open_timeout_s, required=self.options.required)
        self._finished: list[JobResult] = []
        """Results that the next ``get_finished_jobs`` returns."""
        self._blocks: dict[str, _RequestBlocks] = {}
        """By id, the blocks of unfinished requests."""
        self._ended: dict[str, bool] = {}
        """By id of an ended request, whether all of its blocks are durable; the oldest request
        first."""
        self._loads: dict[int, _Load] = {}
        """Loads in flight, by job id."""
        self._detached = False
        """Whether the store is not used any more, see ``detach``."""
        self._prefetches: deque[Choice | StoredContext] = deque(maxlen=_MOST_PREFETCHES)
        """Queue of ``prefetch``, the oldest entry first."""
        self._known_answer: list[StoredContext] | None = None
        """Answer for ``take_recent`` to a prefetch whose keys were given, which needs no host;
        None: the host answers."""
        # bound here, because this saves a call in ``lookup``, which runs once per block
        self._contains = self.client.contains
        if self.options.load_policy == "never":
            self._contains = _contains_nothing
        self.load_deadline_s = self.options.load_deadline_s
        self.load_counts: dict[Reason, int] = dict.fromkeys(Reason, 0)
        """Number of requests by what became of the blocks that the store held for them, and of
        those that were refused."""
        self._load_times = LoadTimes()
        """Expected times of loads from this store."""
        self._probes = ProbeTimer(time.monotonic)
        """When to try the store again after it was judged too slow."""
        self._requires_tenant = self.options.tenant == "required"

    def _store_options(self) -> StoreOptions:
        """Return the options of the store.

        :raises ConfigurationError: an option is invalid.
        """
        options = self.options
        # check these two before a host is started
        parse_codec(options.codec)
        parse_durability(options.durability)
        staging_bytes = parse_size(options.staging_bytes, name="staging_bytes")
        largest = max(group.block_bytes for group in self.config.layout.groups)
        least = max(MIN_STAGING_BYTES, BLOCKS_STAGED * largest)
        if staging_bytes < least:
            expected = f"{least} bytes or more, for blocks of {largest} bytes"
            raise ConfigurationError("staging_bytes", options.staging_bytes, expected)
        return StoreOptions(
            codec=options.codec,
            staging_bytes=staging_bytes,
            max_age_s=options.max_age_s,
            durability=options.durability,
            io_threads=options.io_threads,
            strict_identity=options.strict_identity,
            adopt=options.adopt,
            events=self.config.enable_events,
        )

    def _choose_host(self) -> Host:
        """Return the host of the store: a process if one is possible, otherwise a thread."""
        if self.options.host == "process":
            process = self._host_process()
            if process is not None:
                return process
            logger.warning(
                "no descriptor of the primary tier, or no pidfds: the store runs in a thread "
                "of this process"
            )
        rows = self.primary_kv_view
        # the host takes the rows as one sequence of bytes
        if rows.ndim != 1:
            rows = rows.cast("B")
        return ThreadHost(rows)

    def _host_process(self) -> ProcessHost | None:
        """Return a host process, which maps the rows by their descriptors; None if there are no
        descriptors, or the kernel has no pidfds, by which a process watches another one."""
        if not self.config.region_fds:
            return None
        num_bytes = self.config.num_blocks * self.config.layout.row_stride
        try:
            return ProcessHost(self.config.region_fds, num_bytes)
        except OSError:
            return None

    @staticmethod
    def get_tier_type() -> str:
        return "persistent"

    # Lookups and jobs

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> bool | None:
        if self._requires_tenant and req_context.tenant is None:
            return False
        return self._contains(key)

    def holds(self, key: OffloadKey) -> bool:
        """Return whether a load of the block may succeed, for callers without a request.

        :param key: key of the block for its tenant (``tenant_key``).
        """
        return self._contains(key)

    def lookup_prefix(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> int:
        if self._detached or self.options.load_policy == "never":
            return 0
        if self.refuses(req_context):
            return 0
        return self.client.table.prefix(keys)

    def submit_store(self, job_metadata: JobMetadata) -> None:
        """Send a store job to the host, unless its result is known without it: the request is
        refused, the tier is detached, or all blocks are held."""
        keys = job_metadata.keys
        context = job_metadata.req_context
        if self.refuses(context):
            self._end_unsent(job_metadata, success=False)
            return
        # keep the keys: without a description, they are all that is known of the context at its end
        if context.description is None:
            self._blocks_of(context).stored_keys.extend(keys)
        if self._detached:
            self._end_unsent(job_metadata, success=False)
            return
        # a store that compares blocks with those of another release, or stores adopted blocks
        # again, needs the jobs of held blocks, too
        may_skip = not self.client.sends_held_blocks
        if may_skip and self.client.table.prefix(keys) == len(keys):
            # a store of held blocks counts as their use
            self.touch(keys, context)
            self._end_unsent(job_metadata, success=True)
            return
        self.client.submit_store(
            job_metadata.job_id,
            context.req_id,
            keys,
            block_ids=job_metadata.block_ids.tolist(),
            depths=_depths(context.description, keys),
            num_bytes=self._num_bytes(keys),
            tenant=context.tenant or DEFAULT_TENANT,
        )

    def _end_unsent(self, job: JobMetadata, *, success: bool) -> None:
        """End a job that is not sent to the host."""
        self._finished.append(JobResult(job.job_id, success))

    def submit_load(self, job_metadata: JobMetadata) -> None:
        """Send a load job to the host, with the earlier of the job's and the tier's deadlines."""
        if self._detached:
            self._end_unsent(job_metadata, success=False)
            return
        job_id = job_metadata.job_id
        deadline = time.monotonic() + self.load_deadline_s
        if job_metadata.deadline is not None:
            deadline = min(deadline, job_metadata.deadline)
        self._loads[job_id] = _Load(job_metadata)
        keys = job_metadata.keys
        self._load_times.begin(job_id, self._num_bytes(keys))
        rows = job_metadata.block_ids.tolist()
        self.client.submit_load(job_id, keys, rows, deadline)

    # Whether to load

    def expected_load_s(self, num_bytes: int) -> float | None:
        if self.options.load_policy == "always":
            return None
        return self._load_times.expected_s(num_bytes)

    def on_load_declined(
        self,
        keys: Sequence[OffloadKey],
        req_context: ReqContext,
        decision: LoadDecision,
    ) -> None:
        """See ``SecondaryTierManager``. From time to time, the host reads the first blocks and
        discards them: this shows when the store is fast again."""
        self._count_load(req_context, decision.reason, decision, decision.load_s)
        self._probe(keys)

    def on_faster_tier(self, keys: Sequence[OffloadKey]) -> None:
        """See ``SecondaryTierManager``; the host reads blocks as for ``on_load_declined``."""
        self._probe(keys)

    @property
    def is_probe_due(self) -> bool:
        """Whether ``on_load_declined`` and ``on_faster_tier`` would have the host read one or more
        of their first 128 blocks now; otherwise they ignore the keys."""
        return self._probes.is_due

    def _probe(self, keys: Sequence[OffloadKey]) -> None:
        """If a probe is due, have the host read the first blocks and discard them, to measure how
        fast the store is now."""
        num_blocks = self._probes.begin()
        if not num_blocks:
            return
        is_sent = self.client.probe(keys[:num_blocks], PROBE_S)
        if not is_sent:
            # the store is not open: no answer will come
            self._probes.end()

    def on_load_abandoned(self, job_id: int) -> None:
        load = self._loads.get(job_id)
        if load is not None:
            load.is_abandoned = True

    def _end_probe(self) -> None:
        """Take the answer of a probe, if it has arrived, and learn from it."""
        probed = self.client.take_probed()
        if probed is None:
            return
        self._probes.end()
        if probed.num_bytes:
            self._load_times.observe(probed.num_bytes, probed.seconds)
        else:
            # a probe that read nothing before its deadline shows a stall
            self._load_times.stall()

    def _end_load(self, outcome: JobOutcome) -> None:
        """Learn from a load that ended, and count it."""
        load = self._loads.pop(outcome.job_id, None)
        # without a load, this is the outcome of a store job
        if load is None:
            return
        # the job was not sent, or its host died by itself, which shows nothing about the store
        was_not_run = outcome.refused and not outcome.is_late
        if was_not_run:
            self._load_times.cancel(outcome.job_id)
            return
        self._load_times.end(
            outcome.job_id,
            outcome.num_bytes,
            outcome.seconds,
            is_late=outcome.is_late,
        )
        if outcome.is_late or load.is_abandoned:
            reason = Reason.DEADLINE
        else:
            reason = Reason.LOADED
            # a load that ended in time shows more than a probe, so the next probe can wait
            self._probes.reset()
        job = load.job
        self._count_load(job.req_context, reason, job.decision, outcome.seconds)

    def _count_load(
        self,
        req_context: ReqContext,
        reason: Reason,
        decision: LoadDecision | None,
        load_s: float,
    ) -> None:
        """Count a request by the reason for the use of its blocks, and report it to the host.

        :param decision: the decision for the request; None: there was none, as for a refused one.
        :param load_s: seconds that the load took, or was expected to take if it was declined;
            infinite: no load was to be expected.
        """
        self.load_counts[reason] += 1
        compute_s = None if decision is None else decision.compute_s
        # the time is infinite if the store is stalled, or if nothing was to be loaded
        known_s = load_s if math.isfinite(load_s) else None
        report = LoadReport(
            request=req_context.req_id,
            reason=reason.value,
            load_s=known_s,
            compute_s=compute_s,
            time=time.time(),
        )
        self.client.report_load(report)

    def loaded_elsewhere(self, keys: Sequence[OffloadKey]) -> None:
        """Report that another tier loads these blocks: this engine has not computed them (option
        ``adopt``). No keys: it has loaded unknown blocks."""
        if not self._detached:
            self.client.loaded_elsewhere(keys)

    def touch(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        if not (self._detached or self.refuses(req_context)):
            self.client.touch(keys)

    def _num_bytes(self, keys: Sequence[OffloadKey]) -> int:
        """Return the raw bytes of these blocks, each of the size of its KV cache group."""
        groups = self.config.layout.groups
        if len(groups) == 1:
            return len(keys) * groups[0].block_bytes
        return sum(groups[get_offload_group_idx(key)].block_bytes for key in keys)

    def get_finished_jobs(self) -> list[JobResult]:
        """Take the host's answers: results of jobs, which are returned, the end of a probe, and
        which ended requests are durable."""
        for outcome in self.client.poll():
            self._end_load(outcome)
            result = JobResult(
                outcome.job_id,
                success=not outcome.refused,
                failed_keys=list(map(OffloadKey, outcome.failed)),
                num_bytes=outcome.num_bytes,
                seconds=outcome.seconds,
                is_late=outcome.is_late,
            )
            self._finished.append(result)
        if self._probes.is_running:
            self._end_probe()
        for req_id, is_durable in self.client.take_persisted().items():
            self._remember_durability(req_id, is_durable)
        finished = self._finished
        self._finished = []
        return finished

    def on_restored(self, keys: Sequence[OffloadKey], req_context: ReqContext) -> None:
        restored = self._blocks_of(req_context).restored
        restored.update(map(get_offload_group_idx, keys))

    def _blocks_of(self, req_context: ReqContext) -> _RequestBlocks:
        """Return the record of a request's blocks, which is new at the first call."""
        return self._blocks.setdefault(req_context.req_id, _RequestBlocks())

    def report_restored(self, req_context: ReqContext) -> int:
        """Report the tokens whose blocks a request has loaded (``on_restored``), when it ends, and
        return their number. ``on_request_finished`` does so; an engine that does not call
        ``on_request_finished`` for a request must call this method.
        """
        blocks = self._blocks.pop(req_context.req_id, None)
        if blocks is None:
            return 0
        # take the group with the most, because groups with a sliding window load only their last
        # blocks
        num_blocks = max(blocks.restored.values(), default=0)
        num_tokens = num_blocks * self.config.block_size
        if not num_tokens:
            return 0
        labels: dict[str, str] = {}
        if req_context.description is not None:
            labels = req_context.description.labels
        saved = Saved(restored_tokens=num_tokens, labels=labels)
        self.client.report_saved(saved)
        return num_tokens

    def record_prefill(self, num_tokens: int, seconds: float) -> None:
        """Record how long a prefill took without the waits before it, in an engine that measures
        it. From that speed, tools compute the seconds that restored tokens have saved."""
        if not self._detached:
            saved = Saved(prefill_tokens=num_tokens, prefill_s=seconds)
            self.client.report_saved(saved)

    def has_pending_work(self) -> bool:
        return bool(self._finished) or self.client.has_pending_work

    def drain_jobs(self, timeout_s: float) -> bool:
        """See ``SecondaryTierManager``. The host writes all accepted blocks; True does not mean
        that they are durable: see ``StoreClient.flush``.
        """
        deadline = time.monotonic() + timeout_s
        self.client.flush(timeout_s)
        # ``flush`` has taken a part of the time, perhaps all of it
        while self.client.num_jobs and time.monotonic() < deadline:
            self._poll_and_wait()
        return not self.client.num_jobs

    def _poll_and_wait(self) -> None:
        """Take the host's answers, keep the results for the next ``get_finished_jobs``, and wait
        until another poll is worth it."""
        # this returns the results that were kept before, too
        self._finished = self.get_finished_jobs()
        time.sleep(_NAP_S)

    # Requests

    def refuses(self, req_context: ReqContext) -> bool:
        """Return whether a request neither uses nor fills the store, because it names no tenant
        (option ``tenant``)."""
        return self._requires_tenant and req_context.tenant is None

    def report_refused(self, req_context: ReqContext, why: str) -> None:
        """Count a request that neither uses nor fills the store; log the first one.

        :param why: the reason, in words.
        """
        if not self.load_counts[Reason.REFUSED]:
            logger.warning(
                "request %s neither uses nor fills the store: %s. Further such requests are "
                "counted as refused",
                req_context.req_id,
                why,
            )
        self._count_load(req_context, Reason.REFUSED, decision=None, load_s=math.inf)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self.refuses(req_context):
            self.report_refused(req_context, NO_TENANT)
            return RequestOffloadingContext(OffloadPolicy.BLOCK_LEVEL)
        return RequestOffloadingContext(OffloadPolicy.REQUEST_LEVEL)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Send the end of a request to the host, which writes its manifest. If the request is
        refused or invalid, or the tier detached, the request counts as not persisted."""
        req_id = req_context.req_id
        # take the keys before ``report_restored``, which forgets the request's blocks
        stored_keys = self._blocks_of(req_context).stored_keys
        num_restored = self.report_restored(req_context)
        if self._detached or self.refuses(req_context):
            self._remember_durability(req_id, is_durable=False)
            return
        description = req_context.description
        is_described = description is not None
        if description is None:
            # the stored keys, in the order of their arrival, are all that is known of the request
            description = self._describe(stored_keys)
        num_groups = len(self.config.layout.groups)
        if len(description.group_keys) != num_groups:
            logger.error(
                "request %s has keys of %d groups; there are %d",
                req_id,
                len(description.group_keys),
                num_groups,
            )
            self._remember_durability(req_id, is_durable=False)
            return
        group_keys = [list[bytes](keys) for keys in description.group_keys]
        end = RequestEnd(
            request=req_id,
            manifest_id=self._manifest_id(req_id),
            group_keys=tuple(group_keys),
            tokens=description.num_tokens,
            block_size=self.config.block_size,
            ordered=is_described,
            labels=description.labels,
            retention=description.retention,
            restored_tokens=num_restored,
            tenant=req_context.tenant or DEFAULT_TENANT,
        )
        self.client.end_request(end)

    def _manifest_id(self, req_id: str) -> str:
        """Return the id of a request's manifest, which replaces any manifest with this id."""
        if self.options.unique_request_ids:
            return req_id
        # an engine that uses the request's id again, such as after a restart, must not replace the
        # manifest of the earlier request
        return secrets.token_hex(16)

    def _describe(self, keys: Sequence[OffloadKey]) -> RequestDescription:
        """Return the description of a request from its stored keys, in the order of their
        arrival."""
        num_groups = len(self.config.layout.groups)
        description = RequestDescription(num_groups)
        # a block that was stored twice counts once
        distinct = dict.fromkeys(keys)
        for key in distinct:
            group = get_offload_group_idx(key)
            # the store has no group for other keys
            if group < num_groups:
                description.extend(group, [key])
        return description

    def _remember_durability(self, req_id: str, is_durable: bool) -> None:
        """Keep whether all blocks of an ended request are durable, and forget the oldest request if
        there are too many."""
        # remove it first, so that an id that is used again becomes the newest
        self._ended.pop(req_id, None)
        self._ended[req_id] = is_durable
        if len(self._ended) > REMEMBERED_ENDS:
            oldest = next(iter(self._ended))
            del self._ended[oldest]

    def ask_recent(self, max_blocks: int, *, prefetched: bool = False) -> bool:
        """Ask the store for keys of stored requests, to promote their blocks, most recently used
        requests first. ``take_recent`` returns the keys.

        :param max_blocks: most keys to return, over all requests.
        :param prefetched: ask only for the oldest entry of ``prefetch``, and remove it.
        :returns: False if nothing was asked for: the store is not open (retry later), ``prefetch``
            has no entry, or the tier is detached.
        """
        if self._detached:
            return False
        if prefetched:
            return self._ask_prefetched(max_blocks)
        return self.client.ask_recent(max_blocks)

    def _ask_prefetched(self, max_blocks: int) -> bool:
        """Ask for the oldest entry of ``prefetch``; see ``ask_recent``."""
        if not self._prefetches:
            return False
        oldest = self._prefetches[0]
        is_asked = True
        if isinstance(oldest, Choice):
            is_asked = self.client.ask_recent(max_blocks, oldest)
        else:
            # the keys are known: the store has nothing to add
            keys = oldest.keys[:max_blocks]
            self._known_answer = [StoredContext(oldest.tenant, keys)]
        if is_asked:
            self._prefetches.popleft()
        return is_asked

    def prefetch(self, choice: Choice | StoredContext) -> None:
        """Queue contexts to promote. Each later ``ask_recent`` with ``prefetched`` takes the oldest
        entry.

        At most 64 entries are queued; a further one replaces the oldest.

        :param choice: filter of stored requests, or one context with its keys in order.
        """
        if isinstance(choice, Choice) and not choice.is_encodable:
            logger.warning(
                "a prefetch is ignored: its request id or a label is no valid text"
            )
            return
        if not self._detached:
            self._prefetches.append(choice)

    @property
    def prefetch_waits(self) -> bool:
        """Whether the queue of ``prefetch`` has entries."""
        return bool(self._prefetches)

    def take_recent(self) -> list[StoredContext] | None:
        """Return the answer to the last ``ask_recent`` once: a context per stored request. An empty
        list: there is no such request, or the store cannot be read. None: no answer has arrived.
        """
        known = self._known_answer
        if known is not None:
            self._known_answer = None
            return known
        return self.client.take_recent()

    def take_events(self) -> Iterable[OffloadingEvent]:
        """Return the keys that became durable or were removed since the last call, as at most two
        events: the removed ones first."""
        changes = self.client.take_events()
        medium = self.get_tier_type()
        events = []
        # ``lost`` is reported even if no removed key is known
        if changes.removed or changes.lost:
            keys = list(map(OffloadKey, changes.removed))
            event = OffloadingEvent(keys, medium, removed=True, lost=changes.lost)
            events.append(event)
        if changes.stored:
            keys = list(map(OffloadKey, changes.stored))
            events.append(OffloadingEvent(keys, medium, removed=False))
        return events

    def reset_cache(self, weights_changed: bool) -> None:
        """Detach the tier if weights changed, since its identity is no longer the engine's; see
        ``detach``."""
        if weights_changed and not self._detached:
            self.detach()
            logger.error(
                "weights changed without a new identity: nothing is persisted from here on"
            )

    def detach(self) -> None:
        """End the use of the store for good, without waiting: lookups miss, and later jobs fail.
        The store keeps its blocks, and still writes those of jobs that it has accepted.
        """
        self._detached = True
        self._contains = _contains_nothing
        # ``ask_recent`` takes no entry any more, and an engine must not wait for one
        self._prefetches.clear()

    def persisted(self, req_id: str) -> bool | None:
        """Return whether all blocks of a finished request are durable; None: not known yet, or no
        longer."""
        return self._ended.get(req_id)

    def wait_persisted(self, req_id: str, timeout_s: float) -> bool:
        """Wait until all blocks of a finished request are durable, at most ``timeout_s`` seconds.

        :returns: whether they are. False: some were dropped, the timeout passed, or the result is
            no longer known: those of the last 4,096 requests are kept.
        """
        deadline = time.monotonic() + timeout_s
        while req_id not in self._ended and time.monotonic() < deadline:
            self._poll_and_wait()
        return self._ended.get(req_id, False)

    def shutdown(self) -> None:
        self.client.close()


def _contains_nothing(key: bytes) -> bool:
    return False


def _depths(
    description: RequestDescription | None,
    keys: Sequence[OffloadKey],
) -> list[int] | None:
    """Return the depth of each block in its request; None if one is not known."""
    if description is None:
        return None
    depths: list[int] = []
    for key in keys:
        depth = description.depth(key)
        if depth is None:
            return None
        depths.append(depth)
    return depths
