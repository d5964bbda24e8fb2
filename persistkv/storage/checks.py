"""Outcomes of the checks of ``persistkv doctor``, and the check of every shared medium: whether its
calls work."""

from __future__ import annotations

import enum
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.blobs import BlobMissingError, Blobs, UnavailableError

_PROBE_BYTES = 1024
_SKEW_S = 300.0  # 5 minutes: difference of clocks from which on a check warns
_ROUNDING_S = 1.0  # a medium may round its times to whole seconds
SLOW_S = 2.0  # seconds from which on a call with 1 KiB is slow
_NO_DEFECT = ""  # returned by a call whose result is as expected
_NO_ANSWER = (
    "check its address and the network; engines start without it, and try again"
)
_SLOW = "loads take long: look for throttling, or use a medium that is nearer"
_WRONG_CLOCK = (
    "set the wrong clock (NTP): nothing expires while the clocks differ by more than an hour, "
    "and S3 refuses requests of a machine whose clock is wrong by 15 minutes"
)


class Level(enum.StrEnum):
    """Severity of a check's outcome."""

    OK = "ok"
    NOTE = "note"  # requires no action
    # persistkv works, but something will be slow, or will run out of space
    WARNING = "warning"
    PROBLEM = "problem"  # persistkv does not work


class Check(msgspec.Struct, frozen=True):
    """The outcome of one check."""

    check: str
    """Name of the check."""
    level: Level
    found: str
    """What the check has found, in words."""
    todo: str = ""
    """The remedy; empty if none is needed."""


class CallsCheck:
    """Check of the calls that a store makes, with a blob of 1 KiB under a random name, which is
    deleted again.

    :param remedies: what to do if a call is refused, by method of ``Blobs``: put, read, list,
        delete.
    :param writes: False: only make the calls of engines that only read.
    """

    def __init__(
        self,
        blobs: Blobs,
        remedies: Mapping[str, str],
        *,
        writes: bool,
    ) -> None:
        self.answers = True
        """Whether the medium answered every call; if not, other calls would time out."""
        self._blobs = blobs
        self._remedies = remedies
        self._writes = writes
        self._name = f"probe-{secrets.token_hex(16)}"
        """Name of the blob."""
        self._content = secrets.token_bytes(_PROBE_BYTES)
        """Bytes of the blob."""
        self._ahead_s = 0.0
        """By how much the medium's clock is ahead of this machine's, as ``_put`` has found it;
        negative: behind."""

    def run(self) -> Iterator[Check]:
        """Make the calls, and yield the outcome of each. Failures are outcomes; nothing is
        raised."""
        # any of these calls may set ``answers`` to False, which ends the check
        yield self._try("list", method="list", call=self._list)
        if not self.answers:
            return
        # give the remedy of ``list``: S3 refuses reads of absent objects to users who may not list
        yield self._try("missing object", method="list", call=self._read_missing)
        if not self.answers or not self._writes:
            return
        put = self._try("put", method="put", call=self._put)
        yield put
        if put.level is Level.PROBLEM:
            with suppress(StoreError):  # the blob may have been written all the same
                self._blobs.delete([self._name])
            return
        yield self._clock()
        yield self._try("read", method="read", call=self._read)
        yield self._deleted()

    def _try(
        self,
        check: str,
        method: str,
        call: Callable[[], str],
    ) -> Check:
        """Make a call, and return its outcome. If the medium does not answer, ``answers`` becomes
        False.

        :param method: of ``Blobs``, which selects the remedy.
        :param call: returns the defect of the result, or ``_NO_DEFECT``.
        """
        begin = time.monotonic()
        remedy = self._remedies.get(method, f"let the medium allow {method}")
        try:
            defect = call()
        except UnavailableError as error:
            self.answers = False
            return Check(check, Level.PROBLEM, str(error), _NO_ANSWER)
        except StoreError as error:
            return Check(check, Level.PROBLEM, str(error), remedy)
        if defect:
            return Check(check, Level.PROBLEM, defect, remedy)
        seconds = time.monotonic() - begin
        if seconds > SLOW_S:
            return Check(check, Level.WARNING, f"works, in {seconds:.1f} s", _SLOW)
        return Check(check, Level.OK, f"works, in {1000 * seconds:.0f} ms")

    def _list(self) -> str:
        """Ask for the first name after the blob's. Any answer will do: return no defect."""
        next(self._blobs.list("", after=self._name), None)
        return _NO_DEFECT

    def _read_missing(self) -> str:
        """Read the blob before it is written, and return the defect of the answer: a store relies
        on the answer that the blob is absent."""
        try:
            self._read_byte()
        except BlobMissingError:
            return _NO_DEFECT
        return "a blob that was never written can be read"

    def _put(self) -> str:
        """Write the blob, and remember how far the medium's clock is from this machine's. Return no
        defect."""
        before = time.time()
        written = self._blobs.put(self._name, [self._content])
        after = time.time()
        # a time within the call, or within a second of it, shows no difference of the clocks
        if written > after + _ROUNDING_S:
            self._ahead_s = written - after
        elif written < before - _ROUNDING_S:
            self._ahead_s = written - before
        return _NO_DEFECT

    def _clock(self) -> Check:
        """Return the outcome of the comparison of the clocks, after ``_put``."""
        check = "medium's clock"
        seconds = abs(self._ahead_s)
        if seconds <= _SKEW_S:
            # the medium may round its times, so a smaller difference cannot be told
            most_s = max(seconds, _ROUNDING_S)
            found = f"at most {most_s:.0f} s from this machine's"
            return Check(check, Level.OK, found)
        relation = "ahead of" if self._ahead_s > 0 else "behind"
        found = f"{seconds:.0f} s {relation} this machine's"
        return Check(check, Level.WARNING, found, _WRONG_CLOCK)

    def _read(self) -> str:
        """Read the blob, and look for it in a list; return the defect of the answers."""
        found = bytearray(_PROBE_BYTES)
        buffers = [memoryview(found)]
        self._blobs.read(self._name, 0, _PROBE_BYTES, buffers)
        if bytes(found) != self._content:
            return "other bytes were read than were written"
        # list from a name just before the blob's, so that the list begins with the blob
        listed = self._blobs.list("", after=self._name[:-1])
        first = next(listed, None)
        if first is None or first.name != self._name:
            return "a list lacks a blob that was just written"
        return _NO_DEFECT

    def _deleted(self) -> Check:
        """Delete the blob, and return the outcome: a failure is only a warning."""
        deleted = self._try("delete", method="delete", call=self._delete)
        if deleted.level is not Level.PROBLEM:
            return deleted
        # make it a warning, because engines work without deletions until no room is left
        found = f"{deleted.found}; this check leaves {self._name}"
        return Check("delete", Level.WARNING, found, deleted.todo)

    def _delete(self) -> str:
        """Delete the blob and read it; return the defect if it can still be read."""
        self._blobs.delete([self._name])
        try:
            self._read_byte()
        except BlobMissingError:
            return _NO_DEFECT
        return "a deleted blob can still be read"

    def _read_byte(self) -> None:
        """Read the first byte of the blob, and discard it.

        :raises BlobMissingError: the blob is absent.
        """
        buffer = memoryview(bytearray(1))
        self._blobs.read(self._name, 0, 1, [buffer])
