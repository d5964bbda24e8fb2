"""Whether an engine loads a prefix that a block store holds, or computes it: for adapters of
engines that ask for the hits of a prompt, and do not tell their speed.

An option gives the speed. The times of loads are those that the adapter has observed. While loads
are declined, one block is read now and then in the background, which shows when the store is fast
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from persistkv.errors import PersistKVError
from persistkv.storage.blocks import BlockStore
from persistkv.storage.threads import ThreadPool
from persistkv.tiering.load_cost import LoadChooser, LoadRun, LoadTimes, PrefillSpeed
from persistkv.tiering.probing import PROBE_S, ProbeTimer

_STALLED_S = (
    1.0  # a load that brings nothing in this time hangs; a shorter one found nothing
)


class PrefixLoads:
    """Decides about the loads of the stores on one medium. Thread-safe."""

    def __init__(
        self, prefill_tokens_per_s: float | None, call_bytes: int | None = None
    ) -> None:
        """:param prefill_tokens_per_s: tokens per second that the engine computes; None: every
            prefix is loaded.
        :param call_bytes: most bytes that the engine loads with one call, one after the other;
            None: all.
        """
        self._call_bytes = call_bytes
        self._chooser = LoadChooser(PrefillSpeed(prefill_tokens_per_s))
        self._times = LoadTimes()
        self._probes = ProbeTimer(time.monotonic)
        self._lock = threading.Lock()
        self._prober: ThreadPool | None = None
        if prefill_tokens_per_s is not None:
            self._prober = ThreadPool(1, "persistkv-probe")
        self.num_declined = 0
        """Prefixes that were declined."""

    def expected_load_s(self, num_bytes: int) -> float:
        """Return the expected seconds of a load of so many bytes; 0 if nothing is known."""
        num_calls = 0
        if self._call_bytes is not None:
            num_calls, num_bytes = divmod(num_bytes, self._call_bytes)
        expected_s = 0.0
        if num_calls:
            expected_s = num_calls * self._times.expected_s(self._call_bytes or 0)
        if num_bytes:
            expected_s += self._times.expected_s(num_bytes)
        return expected_s

    def is_worth(self, num_bytes: int, start: int, stop: int) -> bool:
        """Return whether loading the tokens from ``start`` to ``stop - 1``, of so many bytes, is
        expected to be faster than computing them."""
        if self._prober is None or num_bytes <= 0:
            return True
        run = LoadRun(self, stop, num_bytes)
        with self._lock:
            is_worth = self._chooser.choose([run], start).num_runs > 0
            self.num_declined += not is_worth
        return is_worth

    def add_load(self, num_bytes: int, seconds: float) -> None:
        """Add a load of so many bytes that has ended; 0: it brought none in this time."""
        with self._lock:
            if num_bytes:
                self._times.observe(num_bytes, seconds)
                self._probes.reset()
            elif seconds >= _STALLED_S:
                self._times.stall()

    def probe(self, store: BlockStore, key: bytes, num_bytes: int) -> None:
        """Read a block of a declined prefix in the background, if it is time for that.

        :param key: the block, which ``store`` holds.
        """
        if self._prober is None:
            return
        with self._lock:
            if not self._probes.begin():
                return
        self._prober.submit(self._read, store, [key], num_bytes)

    def _read(self, store: BlockStore, keys: Sequence[bytes], num_bytes: int) -> None:
        begin = time.monotonic()
        try:
            (is_read,) = store.get(keys, [bytearray(num_bytes)], timeout_s=PROBE_S)
        except PersistKVError:
            is_read = False  # the store was closed
        seconds = time.monotonic() - begin
        with self._lock:
            self._probes.end()
            if is_read:
                self._times.observe(num_bytes, seconds)
            elif seconds >= _STALLED_S:
                self._times.stall()

    def close(self) -> None:
        """End the thread of the probes, without waiting for one. Idempotent."""
        if self._prober is not None:
            self._prober.shutdown(wait=False)
