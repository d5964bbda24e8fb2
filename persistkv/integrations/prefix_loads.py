"""Whether an engine loads a prefix that a block store holds, or computes it: for adapters of
engines that ask for the hits of a prompt, and do not report their speed.

An option gives the speed. The times of loads are those that the adapter has observed. While loads
are declined, one block is read now and then in the background, which shows when the store is fast
again.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from persistkv.errors import PersistKVError
from persistkv.storage.blocks import BlockStore
from persistkv.storage.threads import ThreadPool
from persistkv.tiering.load_cost import LoadChooser, LoadRun, LoadTimes, PrefillSpeed
from persistkv.tiering.probing import PROBE_S, ProbeTimer

_STALLED_S = 1.0
"""A load that ends without bytes after so many seconds has hung; a shorter one found nothing."""
_HUNG_RATIO = 3.0
"""A load in progress counts as hung once it takes so many times its expected time."""


@dataclass
class _RunningLoad:
    """A load in progress. Times are those of the clock of ``PrefixLoads``, in seconds."""

    began: float
    """Time at which the load began."""
    hung_at: float
    """Time from which on the load counts as hung."""
    is_reported_hung: bool = False
    """Whether the load was reported to ``LoadTimes`` as hung while it was in progress."""


class PrefixLoads:
    """Decides whether prefixes are loaded from the stores on one medium. Thread-safe."""

    def __init__(
        self,
        prefill_tokens_per_s: float | None,
        *,
        call_bytes: int | None = None,
        timeout_s: float = _STALLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """:param prefill_tokens_per_s: tokens per second that the engine computes; None: every
            prefix is loaded.
        :param call_bytes: maximum bytes of one call. The engine divides a larger load into several
            calls, which it makes one after the other. None: one call loads everything.
        :param timeout_s: seconds after which a load ends, whatever it has brought.
        :param clock: returns seconds.
        """
        self._call_bytes = call_bytes
        self._stalled_s = min(timeout_s, _STALLED_S)
        """Seconds after which a load that has brought nothing counts as hung."""
        self._chooser = LoadChooser(PrefillSpeed(prefill_tokens_per_s))
        """Compares the time of a load with that of computing its tokens."""
        self._times = LoadTimes()
        """Expected times of loads, from those that were observed here."""
        self._probe_timer = ProbeTimer(clock)
        """Tells when a probe is due: the read of one block of a declined prefix."""
        self._clock = clock
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        """Counts the loads: each has a number."""
        self._running: dict[int, _RunningLoad] = {}
        """Loads in progress, by the number that ``begin_load`` has returned."""
        self._prober: ThreadPool | None = None
        """Thread that reads blocks of declined prefixes; None: no prefix is ever declined."""
        if prefill_tokens_per_s is not None:
            self._prober = ThreadPool(1, "persistkv-probe")
        self.num_declined = 0
        """Prefixes that were declined."""

    def expected_load_s(self, num_bytes: int) -> float:
        """Return the expected seconds of a load of ``num_bytes`` bytes; 0 if nothing is known."""
        call_bytes = self._call_bytes
        if call_bytes is None:
            return self._times.expected_s(num_bytes)
        # a load consists of calls of this size, and one call for the rest
        num_calls, rest_bytes = divmod(num_bytes, call_bytes)
        expected_s = 0.0
        if num_calls:
            expected_s = num_calls * self._times.expected_s(call_bytes)
        if rest_bytes:
            expected_s += self._times.expected_s(rest_bytes)
        return expected_s

    def is_worth_loading(self, num_bytes: int, num_tokens: int) -> bool:
        """Return whether loading a prefix of ``num_bytes`` bytes is expected to be faster than
        computing its ``num_tokens`` tokens."""
        # without a prober, no speed of the engine is known: every prefix is loaded
        if self._prober is None or num_bytes <= 0:
            return True
        # the chooser asks ``expected_load_s`` of this object for the time of the load
        run = LoadRun(self, num_tokens, num_bytes)
        with self._lock:
            # report loads that hang first, so that the decision takes them into account
            self._report_hung()
            # the prefix is one run that begins at token 0: it is loaded whole or not at all
            decision = self._chooser.choose([run], start=0)
            is_loaded = decision.num_runs > 0
            if not is_loaded:
                self.num_declined += 1
        return is_loaded

    def begin_load(self, num_bytes: int) -> int:
        """Begin a load of ``num_bytes`` bytes; return its number, for ``end_load``."""
        now = self._clock()
        with self._lock:
            number = next(self._numbers)
            expected_s = self._times.expected_s(num_bytes)
            hung_s = max(self._stalled_s, _HUNG_RATIO * expected_s)
            self._times.begin(number, num_bytes)
            self._running[number] = _RunningLoad(began=now, hung_at=now + hung_s)
        return number

    def end_load(self, number: int, loaded_bytes: int) -> None:
        """End a load.

        :param loaded_bytes: bytes that it brought.
        """
        with self._lock:
            load = self._running.pop(number)
            seconds = self._clock() - load.began
            if not load.is_reported_hung:
                has_hung = not loaded_bytes and seconds >= self._stalled_s
                self._times.end(number, loaded_bytes, seconds, is_late=has_hung)
            elif loaded_bytes:
                # For ``LoadTimes``, the load ended when it was reported as hung: add what it
                # brought since as a sample of its own.
                self._times.observe(loaded_bytes, seconds)
            # a load shows more than a probe, so the next probe can wait
            if loaded_bytes:
                self._probe_timer.reset()

    def _report_hung(self) -> None:
        """Report the loads that hang to ``LoadTimes``, each once, as if they had ended: from then
        on the store counts as stalled, until a probe or another load has brought bytes."""
        now = self._clock()
        for number, load in self._running.items():
            if load.is_reported_hung or now < load.hung_at:
                continue
            load.is_reported_hung = True
            seconds = now - load.began
            self._times.end(number, loaded_bytes=0, seconds=seconds, is_late=True)

    def probe_if_due(
        self,
        store: BlockStore,
        key: bytes,
        num_bytes: int,
    ) -> None:
        """Read a block of a declined prefix in the background, if a probe is due. Ignored after
        ``close``.

        :param key: key of the block, which ``store`` holds.
        :param num_bytes: bytes of the block.
        """
        if self._prober is None:
            return
        with self._lock:
            if not self._probe_timer.begin():
                return
        # RuntimeError means that this object was closed meanwhile
        with suppress(RuntimeError):
            self._prober.submit(self._read_probe, store, key, num_bytes)

    def _read_probe(
        self,
        store: BlockStore,
        key: bytes,
        num_bytes: int,
    ) -> None:
        """Read a block for a probe, and discard it: the time shows whether the store is fast
        again."""
        begin = self._clock()
        is_read = False
        # ignore a closed store and missing memory: the prober's thread must not end
        with suppress(PersistKVError, MemoryError):
            memory = bytearray(num_bytes)
            (is_read,) = store.get([key], [memory], timeout_s=PROBE_S)
        seconds = self._clock() - begin
        with self._lock:
            self._probe_timer.end()
            if is_read:
                self._times.observe(num_bytes, seconds)
            elif seconds >= self._stalled_s:
                self._times.stall()

    def close(self) -> None:
        """End the thread of the probes, without waiting for one. Idempotent."""
        if self._prober is not None:
            self._prober.shutdown(wait=False)
