"""Tests of the contract of ``SecondaryTierManager``, for any tier.

Subclass ``SecondaryTierConformance`` and implement ``open_tier``. Needs pytest and numpy; no torch.
"""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from persistkv.base import OffloadKey, ReqContext, RequestDescription, make_offload_key
from persistkv.config import GroupLayout, OffloadingConfig, RowLayout
from persistkv.tiering.base import JobMetadata, JobResult, SecondaryTierManager

NUM_ROWS = 48
STRIDE = 12288  # bytes of a row
# two groups: one with the first page of a row, one with two ranges and gaps
_ONE_RANGE = GroupLayout.of_bytes(4096)
_TWO_RANGES = GroupLayout(((4096, 100), (8192, 4096)))
LAYOUT = RowLayout(STRIDE, (_ONE_RANGE, _TWO_RANGES))
TIMEOUT_S = 90.0  # seconds after which a job without a result fails the test
_POLL_S = 0.0005  # seconds between two polls of the tier
_UNTOUCHED = 0x5A  # byte of rows that no load may change


class TierRig:
    """A secondary tier under test, and the primary tier's rows that it uses, shape (rows, bytes of
    a row)."""

    def __init__(
        self,
        tier: SecondaryTierManager,
        rows: npt.NDArray[np.uint8],
    ) -> None:
        self.tier = tier
        self.rows = rows
        self._job_ids = itertools.count()

    def store(
        self,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        req: ReqContext,
    ) -> int:
        """Submit a store of the blocks in the rows ``block_ids``; return the job's id."""
        return self._submit(keys, block_ids, req, is_promotion=False)

    def load(
        self,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        req: ReqContext,
    ) -> int:
        """Submit a load of blocks into the rows ``block_ids``; return the job's id."""
        return self._submit(keys, block_ids, req, is_promotion=True)

    def _submit(
        self,
        keys: Sequence[OffloadKey],
        rows: Sequence[int],
        req: ReqContext,
        *,
        is_promotion: bool,
    ) -> int:
        """Submit a job with a new id; return the id."""
        job_id = next(self._job_ids)
        job = JobMetadata(
            job_id=job_id,
            keys=list(keys),
            block_ids=np.array(rows, np.int64),
            is_promotion=is_promotion,
            req_context=req,
        )
        if is_promotion:
            self.tier.submit_load(job_metadata=job)
        else:
            self.tier.submit_store(job_metadata=job)
        return job_id

    def results(self, job_ids: Collection[int]) -> dict[int, JobResult]:
        """Poll the tier until each of the jobs has a result, 90 s at most; return the results by
        job id. Fail if another job gets a result, or one of these jobs gets two.
        """
        found: dict[int, JobResult] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(found) < len(job_ids):
            for result in self.tier.get_finished_jobs():
                job_id = result.job_id
                assert job_id in job_ids, f"job {job_id} was not submitted"
                assert job_id not in found, f"job {job_id} was answered twice"
                found[job_id] = result
            missing = set(job_ids) - set(found)
            assert time.monotonic() < deadline, f"no result for jobs {missing}"
            time.sleep(_POLL_S)
        return found

    def run(self, job_id: int) -> JobResult:
        """Wait for one job, with the conditions of ``results``, and return its result."""
        results = self.results([job_id])
        return results[job_id]

    def wait_held(self, keys: Sequence[OffloadKey], req: ReqContext) -> None:
        """Poll the tier until lookups find all keys, 90 s at most: it may need time to make the
        blocks durable. Fail if a job gets a result meanwhile.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not all(self.tier.lookup(key, req) for key in keys):
            unexpected = list(self.tier.get_finished_jobs())
            assert not unexpected
            # take events in each step, as the manager of the primary tier does
            self.tier.take_events()
            assert time.monotonic() < deadline, "stored blocks do not become visible"
            time.sleep(_POLL_S)

    def check_loaded(
        self,
        key: OffloadKey,
        row: int,
        stored: npt.NDArray[np.uint8],
        source: int,
    ) -> None:
        """Assert that a row holds the key's block as it was stored.

        :param row: number of the row into which the block was loaded.
        :param stored: copy of the rows at the time of the store.
        :param source: number of the row, in ``stored``, from which the block was stored.
        """
        loaded = block_bytes(self.rows, key, row)
        assert loaded == block_bytes(stored, key, source)

    def store_until_held(
        self,
        keys: Sequence[OffloadKey],
        block_ids: Sequence[int],
        req: ReqContext,
    ) -> None:
        """Store blocks, end the request, and wait until lookups find them."""
        job_id = self.store(keys, block_ids, req)
        self.run(job_id)
        self.finish(req, keys)

    def finish(self, req: ReqContext, keys: Sequence[OffloadKey]) -> None:
        """End a request, and wait until lookups find its blocks."""
        # a tier need not show the blocks of a running request
        self.tier.on_request_finished(req)
        self.wait_held(keys, req)


def block_bytes(
    rows: npt.NDArray[np.uint8],
    key: OffloadKey,
    row: int,
) -> bytes:
    """Return the bytes of the key's block in row number ``row``."""
    parts = []
    for offset, size in ranges_of(key):
        part = rows[row, offset : offset + size]
        parts.append(part.tobytes())
    return b"".join(parts)


def ranges_of(key: OffloadKey) -> Sequence[tuple[int, int]]:
    """Return the byte ranges (offset, length) of a row that the key's group uses."""
    group = key[-1]  # the last byte of a small group index
    return LAYOUT.groups[group].ranges


class SecondaryTierConformance(ABC):
    """Tests of the contract of a secondary tier. pytest runs them in a subclass whose name begins
    with ``Test``."""

    num_blocks = 16
    """Number of blocks that the tier must be able to hold; not the number of rows."""

    @abstractmethod
    def open_tier(
        self,
        config: OffloadingConfig,
        view: memoryview,
    ) -> SecondaryTierManager:
        """Return a new, empty tier that uses the primary tier's rows.

        :param view: the rows, shape (``config.num_blocks``, row stride in bytes), writable.
        """

    @pytest.fixture
    def rig(self) -> Iterator[TierRig]:
        """An open tier with rows of random bytes."""
        shape = (NUM_ROWS, STRIDE)
        rng = np.random.default_rng(11)
        content = rng.integers(0, 256, shape, dtype=np.uint8)
        memory = bytearray(content.tobytes())
        view = memoryview(memory).cast("B", shape)
        config = OffloadingConfig(
            identity={"weights": "w"},
            block_size=16,
            layout=LAYOUT,
            num_blocks=NUM_ROWS,
        )
        tier = self.open_tier(config, view)
        # writable, because ``memory`` is: tests change rows, and see those that loads fill
        rows = np.frombuffer(memory, dtype=np.uint8)
        yield TierRig(tier, rows.reshape(shape))
        tier.drain_jobs(TIMEOUT_S)
        tier.shutdown()
        tier.shutdown()  # idempotent
        view.release()  # raises BufferError if the tier still references the rows

    @pytest.fixture
    def request_of(self, rig: TierRig) -> Iterator[ReqContext]:
        """A request with two groups of eight blocks each, announced to the tier."""
        num_groups = len(LAYOUT.groups)
        depth = self.num_blocks // num_groups
        description = RequestDescription(num_groups)
        for group in range(num_groups):
            # the same hashes in both groups: keys differ in the group alone
            keys = []
            for number in range(1, depth + 1):
                block_hash = bytes([number]) * 32
                key = make_offload_key(block_hash, group)
                keys.append(key)
            description.extend(group, keys)
        description.num_tokens = 16 * depth
        context = ReqContext("request", description=description)
        rig.tier.on_new_request(context)
        yield context
        rig.tier.on_request_finished(context)

    @staticmethod
    def keys_of(context: ReqContext) -> list[OffloadKey]:
        """Return the keys of all groups, one group after the other, from ``context.description``,
        which must be set."""
        assert context.description is not None
        return list(itertools.chain.from_iterable(context.description.group_keys))

    def test_get_tier_type_returns_nonempty_name(self, rig: TierRig) -> None:
        name = rig.tier.get_tier_type()
        assert name
        # the class has the same name, also without an object
        assert type(rig.tier).get_tier_type() == name

    def test_load_stored_blocks_writes_their_bytes_only(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)
        stored = rig.rows[: len(keys)].copy()
        job_id = rig.store(keys, range(len(keys)), request_of)
        stored_all = JobResult(job_id, success=True, failed_keys=[])
        assert rig.run(job_id) == stored_all
        rig.finish(request_of, keys)

        rig.rows[:] = _UNTOUCHED
        first_row = 20
        targets = range(first_row, first_row + len(keys))
        job_id = rig.load(keys, targets, request_of)
        result = rig.run(job_id)
        assert result.success
        assert list(result.failed_keys) == []

        for source, key in enumerate(keys):
            row = first_row + source
            rig.check_loaded(
                key,
                row=row,
                stored=stored,
                source=source,
            )
            for offset, size in ranges_of(key):
                rig.rows[row, offset : offset + size] = _UNTOUCHED
        # The loop has overwritten the loaded blocks. All other bytes must be as they were before
        # the load.
        assert (rig.rows == _UNTOUCHED).all()

    def test_store_rows_overwritten_after_result_keeps_stored_bytes(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)[:3]
        sources = [0, 1, 2]
        targets = [5, 6, 7]
        stored = rig.rows[:3].copy()
        store_id = rig.store(keys, sources, request_of)
        rig.run(store_id)
        # the tier has returned a result, so it must no longer read the rows
        rig.rows[:3] = 0
        rig.finish(request_of, keys)
        load_id = rig.load(keys, targets, request_of)
        rig.run(load_id)
        for key, target, source in zip(keys, targets, sources, strict=True):
            rig.check_loaded(
                key,
                row=target,
                stored=stored,
                source=source,
            )

    def test_get_finished_jobs_returns_one_result_per_job(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)
        first = rig.store(keys[:4], range(4), request_of)
        # these two name blocks that are held already, or are being stored
        same = rig.store(keys[:4], range(4), request_of)
        overlapping = rig.store(keys[2:6], range(2, 6), request_of)
        empty_store = rig.store([], [], request_of)
        empty_load = rig.load([], [], request_of)
        jobs = [first, same, overlapping, empty_store, empty_load]
        results = rig.results(jobs)
        assert all(result.success for result in results.values())
        assert not list(rig.tier.get_finished_jobs())

    def test_load_absent_block_fails_alone(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)
        first, second = keys[:2]
        stored = rig.rows[:2].copy()
        rig.store_until_held([first, second], [0, 1], request_of)

        absent = make_offload_key(b"absent" * 5, 0)
        assert rig.tier.lookup(absent, request_of) is False
        mixed = [first, absent, second]
        job_id = rig.load(mixed, [10, 11, 12], request_of)
        result = rig.run(job_id)
        assert result.success
        assert list(result.failed_keys) == [absent]
        # the blocks before and after the absent one are loaded
        rig.check_loaded(
            first,
            row=10,
            stored=stored,
            source=0,
        )
        rig.check_loaded(
            second,
            row=12,
            stored=stored,
            source=1,
        )

    def test_store_request_without_description_succeeds(self, rig: TierRig) -> None:
        context = ReqContext("plain")
        rig.tier.on_new_request(context)
        block_hash = b"plain" * 5
        keys = [make_offload_key(block_hash, group) for group in (0, 1)]
        rig.store_until_held(keys, [0, 1], context)

    def test_touch_absent_blocks_does_not_raise(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        rig.tier.touch(self.keys_of(request_of), request_of)

    def test_reset_cache_changed_weights_makes_all_blocks_miss(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)[:3]
        rig.store_until_held(keys, [0, 1, 2], request_of)
        rig.tier.reset_cache(weights_changed=False)
        assert all(rig.tier.lookup(key, request_of) for key in keys)
        rig.tier.reset_cache(weights_changed=True)
        assert not any(rig.tier.lookup(key, request_of) for key in keys)
        # jobs still get results, whether the tier serves them or not
        store_id = rig.store(keys, [0, 1, 2], request_of)
        load_id = rig.load(keys, [3, 4, 5], request_of)
        rig.results([store_id, load_id])

    def test_drain_jobs_makes_results_available_at_once(
        self,
        rig: TierRig,
        request_of: ReqContext,
    ) -> None:
        keys = self.keys_of(request_of)
        job = rig.store(keys, range(len(keys)), request_of)
        assert rig.tier.has_pending_work()
        assert rig.tier.drain_jobs(TIMEOUT_S)
        (result,) = rig.tier.get_finished_jobs()
        assert result.job_id == job
