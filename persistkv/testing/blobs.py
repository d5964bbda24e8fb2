"""A medium in memory, and a wrapper that injects faults into any medium."""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from copy import copy
from functools import partial
from typing import TypeAlias, TypeVar

from persistkv.errors import StoreError
from persistkv.storage.blobs import (
    BlobInfo,
    BlobMissingError,
    Blobs,
    UnavailableError,
    check_name,
    check_prefix,
)
from persistkv.storage.format.codec import Buffer

T = TypeVar("T")

_Fault: TypeAlias = Callable[[str], object]
"""Function that gets the subject of a call; if it raises, the call fails."""
_Condition: TypeAlias = Callable[[str], bool]
"""Whether a fault concerns the calls with a subject."""

METHODS = ("put", "read", "delete", "list")
"""Methods that can have faults."""


class MemoryBlobs(Blobs):
    """Blobs in the memory of this process, for tests.

    Several handles can share a medium: ``handle`` opens another one, as another machine would.

    :param clock: the medium's clock, in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._held: dict[str, tuple[bytes, float]] = {}
        """Bytes and time of writing of each blob; shared by all handles of the medium."""
        self._closed = False

    def handle(self) -> MemoryBlobs:
        """Return another open handle of the same medium, also after ``close``."""
        other = MemoryBlobs(self.clock)
        other._lock = self._lock
        other._held = self._held
        return other

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        check_name(name)
        self._check_open()
        data = b"".join(pieces)
        with self._lock:
            now = self.clock()
            self._held[name] = (data, now)
        return now

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        """Fill the buffers one after the other from ``offset`` on; return the number of bytes."""
        check_name(name)
        self._check_open()
        with self._lock:
            held = self._held.get(name)
        if held is None:
            raise BlobMissingError(f"{name} does not exist")
        data, _ = held
        count = 0
        for buffer in buffers:
            start = offset + count
            end = start + buffer.nbytes
            part = data[start:end]
            bytes_to_fill = buffer.cast("B")
            bytes_to_fill[: len(part)] = part
            count += len(part)
            # the blob has ended: a further buffer must not be taken
            if len(part) < buffer.nbytes:
                break
        return count

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            check_name(name)
        self._check_open()
        with self._lock:
            for name in names:
                self._held.pop(name, None)

    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[BlobInfo]:
        """Return a snapshot of the blobs with this prefix and larger names than ``after``."""
        check_prefix(prefix)
        self._check_open()
        listed: list[BlobInfo] = []
        with self._lock:
            for name, (data, written) in self._held.items():
                if name.startswith(prefix) and name > after:
                    listed.append(BlobInfo(name, len(data), written))
        return iter(sorted(listed))

    def close(self) -> None:
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the blobs in memory are closed")


class FaultyBlobs(Blobs):
    """Wrapper of a medium that injects faults into its calls.

    Faults can be added at any time, from any thread:

        blobs = FaultyBlobs(MemoryBlobs())
        blobs.fail("put", UnavailableError("no reply"), times=1)  # the next put writes nothing
        blobs.fail("put", UnavailableError("no reply"), after=True)  # puts take effect, and fail
        blobs.postpone("delete")  # deletions fail, and take effect in ``run_postponed``
        blobs.before("read", lambda name: time.sleep(5))  # reads are slow
        blobs.split_lists(between=lambda: other.put("a/b", [b"data"]))  # lists are no snapshots
        blobs.clear_faults()

    A method is ``put``, ``read``, ``delete`` or ``list``. The subject of a call, which conditions
    and functions receive, is a name, the prefix of a list, or the names of a deletion, separated by
    spaces.
    """

    def __init__(self, inner: Blobs) -> None:
        self.inner = inner
        self.calls: list[tuple[str, str]] = []
        """All calls, failed ones included, in order: method and subject."""
        self._before: dict[str, list[_Fault]] = defaultdict(list)
        """By method, the faults to run before the effect of a call."""
        self._after: dict[str, list[_Fault]] = defaultdict(list)
        """By method, the faults to run after the effect of a call."""
        self._between: Callable[[], object] | None = None
        """Called between the halves of a list (``split_lists``); None: lists are read at once."""
        self._postponed: list[Callable[[], object]] = []
        """Effects of postponed calls, in order."""
        self._lock = threading.Lock()

    @property
    def latency_s(self) -> float:  # type: ignore[override]
        return self.inner.latency_s

    @property
    def connections(self) -> int:  # type: ignore[override]
        return self.inner.connections

    # Faults

    def before(self, method: str, call: _Fault) -> None:
        """Run ``call(subject)`` before each call of the method; if it raises, the call has no
        effect."""
        _check(method)
        self._before[method].append(call)

    def after(self, method: str, call: _Fault) -> None:
        """Run ``call(subject)`` after the effect of each call; if it raises, the call fails."""
        _check(method)
        self._after[method].append(call)

    def fail(
        self,
        method: str,
        error: Exception,
        *,
        times: int | None = None,
        after: bool = False,
        only: _Condition | None = None,
    ) -> None:
        """Let calls of a method fail.

        :param error: each call raises a copy, because the traceback of an error references the
            buffers of its call.
        :param times: number of calls that fail; None: all, until ``clear_faults``.
        :param after: whether the calls take effect before they fail: the reply is lost.
        :param only: condition that the subject of a call fulfils if the call is to fail; None: all
            calls.
        """
        is_due = _Countdown(times, only)

        def raise_if_due(subject: str) -> None:
            if is_due(subject):
                raise copy(error)

        if after:
            self.after(method, raise_if_due)
        else:
            self.before(method, raise_if_due)

    def delay(
        self,
        method: str,
        seconds: float,
        *,
        times: int | None = None,
    ) -> None:
        """Delay calls of a method before they take effect."""
        is_due = _Countdown(times, only=None)

        def sleep_if_due(subject: str) -> None:
            if is_due(subject):
                time.sleep(seconds)

        self.before(method, sleep_if_due)

    def postpone(
        self,
        method: str,
        *,
        times: int | None = None,
        only: _Condition | None = None,
    ) -> None:
        """Let ``put`` or ``delete`` raise ``UnavailableError``, and take effect in
        ``run_postponed``."""
        if method not in ("put", "delete"):
            raise ValueError(f"{method} has no effect that could be postponed")
        # ``_change`` catches this error, and keeps the effect
        self.fail(method, _PostponedError(), times=times, only=only)

    def run_postponed(self) -> int:
        """Execute the postponed calls in their order; return their number. They have no faults."""
        with self._lock:
            postponed = self._postponed
            self._postponed = []
        for effect in postponed:
            effect()
        return len(postponed)

    def split_lists(self, between: Callable[[], object] = lambda: None) -> None:
        """Let lists consist of two halves that are read at different times.

        The change of a blob in between is visible in the second half only. Checksums of the names
        distribute them (``in_first_half``).

        :param between: called after the first half was read.
        """
        self._between = between

    def clear_faults(self, method: str | None = None) -> None:
        """Remove all faults of a method; None: of all methods. Postponed calls remain."""
        for faults in (self._before, self._after):
            if method is None:
                faults.clear()
            else:
                faults.pop(method, None)
        if method in (None, "list"):
            self._between = None

    # Blobs

    def put(self, name: str, pieces: Sequence[Buffer]) -> float:
        # a copy, because the caller may change the pieces after this call
        data = b"".join(pieces)
        effect = partial(self.inner.put, name, [data])
        return self._change("put", name, effect)

    def read(
        self,
        name: str,
        offset: int,
        length: int,
        buffers: Iterable[memoryview],
    ) -> int:
        self._begin("read", name)
        count = self.inner.read(name, offset, length, buffers)
        self._end("read", name)
        return count

    def delete(self, names: Sequence[str]) -> None:
        effect = partial(self.inner.delete, tuple(names))
        self._change("delete", " ".join(names), effect)

    def erase(
        self,
        prefix: str,
        names: Collection[str],
    ) -> Sequence[str]:
        effect = partial(self.inner.erase, prefix, tuple(names))
        return self._change("delete", " ".join(names), effect)

    def list(
        self,
        prefix: str,
        after: str = "",
    ) -> Iterator[BlobInfo]:
        """List blobs with the faults of ``list``; see ``split_lists``."""
        self._begin("list", prefix)
        between = self._between
        if between is None:
            listed = self.inner.list(prefix, after)
        else:
            listed = self._list_halves(prefix, after, between)
        return self._finish_list(listed, prefix)

    def _list_halves(
        self,
        prefix: str,
        after: str,
        between: Callable[[], object],
    ) -> Iterator[BlobInfo]:
        """Return a list of which one half is read before the call of ``between``, and the other
        half after it."""
        listed_before = self.inner.list(prefix, after)
        first_half = [info for info in listed_before if in_first_half(info.name)]
        between()
        listed_after = self.inner.list(prefix, after)
        second_half = [info for info in listed_after if not in_first_half(info.name)]
        return iter(sorted(first_half + second_half))

    def close(self) -> None:
        self.inner.close()

    def requests(self) -> Mapping[str, int]:
        return self.inner.requests()

    def state(self) -> str:
        return self.inner.state()

    def _finish_list(
        self,
        listed: Iterator[BlobInfo],
        prefix: str,
    ) -> Iterator[BlobInfo]:
        """Yield a list, and run the faults after it when the caller has read it to its end."""
        yield from listed
        self._end("list", prefix)

    def _begin(self, method: str, subject: str) -> None:
        """Record a call, and run its faults before its effect; one of them may raise.

        :raises _PostponedError: the effect is postponed; the caller keeps it for ``run_postponed``.
        """
        self.calls.append((method, subject))
        for fault in list(self._before[method]):
            fault(subject)

    def _end(self, method: str, subject: str) -> None:
        """Run the faults after the effect of a call; one of them may raise."""
        for fault in list(self._after[method]):
            fault(subject)

    def _change(
        self,
        method: str,
        subject: str,
        effect: Callable[[], T],
    ) -> T:
        """Make a call that changes the medium, with its faults.

        :param effect: makes the call of the inner medium; kept if the call is postponed.
        """
        try:
            self._begin(method, subject)
        except _PostponedError:
            with self._lock:
                self._postponed.append(effect)
            raise UnavailableError(f"{method} of {subject}: no reply") from None
        result = effect()
        self._end(method, subject)
        return result


def in_first_half(name: str) -> bool:
    """Return whether ``FaultyBlobs.split_lists`` reads a name before the call in between."""
    return zlib.crc32(name.encode()) % 2 == 0


class _PostponedError(Exception):
    """The call takes effect later."""


class _Countdown:
    """Condition of a fault: it is met by the first ``times`` calls whose subject ``only`` accepts.
    Thread-safe."""

    def __init__(self, times: int | None, only: _Condition | None) -> None:
        """Parameters as for ``FaultyBlobs.fail``."""
        self._left = times
        """Number of further calls that meet the condition; None: all."""
        self._only = only
        self._lock = threading.Lock()

    def __call__(self, subject: str) -> bool:
        """Return whether the call with this subject has the fault; count it if it has."""
        if self._only is not None and not self._only(subject):
            return False
        with self._lock:
            if self._left is None:
                return True
            if self._left == 0:
                return False
            self._left -= 1
            return True


def _check(method: str) -> None:
    """Raise ``ValueError`` unless the method can have faults."""
    if method not in METHODS:
        raise ValueError(f"media have no method {method!r}")
