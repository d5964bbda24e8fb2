"""Savings: the prompt tokens that requests restored from a store instead of computing them.

1. The host of each engine adds up its restored tokens, and writes the sums at an interval into a
   note of the store that no other process writes: its *source*. There is nothing to read before the
   write, nothing to lock, and no request per load. A killed host loses at most one interval.
2. Notes belong to the store, not to a namespace: they outlive evicted content.
3. An engine begins a new source each day, so a source is final two days later. Then the first
   engine that begins a source folds all of that day into one note, and deletes them. A source whose
   day is folded does not count, so a fold that was killed, repeated or done twice counts nothing
   twice. (A fold lists the sources, then looks for the folded note, and only if there is none,
   writes it before it deletes: a list that lacks a source was made after the note was written. A
   source that is listed but cannot be read was deleted by another fold, which has written the note:
   then this one writes none.)
   Callers without an engine (``add_savings``) have a source too, which each of them adds to.
4. Seconds are not recorded, but the measured speed of prefills, as tokens and seconds: the seconds
   that restored tokens would have taken follow from all measurements of the model.

A clock that is wrong by more than a day can lose counts of that day; it counts nothing twice.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import attrgetter

import msgspec

from persistkv.errors import StoreError
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity

logger = logging.getLogger(__name__)

STORE = bytes(16)
"""Namespace of notes about the store itself."""
MOST_LABELS = 256  # maximum labels in a note, which may have 64 KiB
_MOST_LABEL_BYTES = 128  # maximum bytes of a label: name and value together
MEASURED_TOKENS = 64
"""Prefills of fewer tokens do not show the speed of long ones, and are not recorded."""
_DAY_S = 86_400
_FINAL_DAYS = 2  # days after which the sources of a day are final
_FOLDED = "all"  # stands for the source in the name of a folded note
# attempts to read a sum; a fold, once a day for moments, can disturb one
_READ_ATTEMPTS = 3
_NAME = re.compile(
    r"s(?P<day>\d{5})(?P<namespace>[0-9a-f]{8})(?P<source>[0-9a-f]{16}|all)"
)
"""Name of a note: the day since the epoch, the first digits of the namespace's id, the source."""
_LOCAL_S = 60.0  # seconds between two writes to a local store
# the same for a remote store, where each write is a request that costs money
_REMOTE_S = 300.0


class Restored(msgspec.Struct):
    """Requests that restored tokens, and how many."""

    requests: int = 0
    tokens: int = 0

    def add(self, other: Restored) -> None:
        self.requests += other.requests
        self.tokens += other.tokens


class Savings(msgspec.Struct):
    """Tokens that requests of one namespace restored, and the speed of its prefills."""

    namespace: str
    """Id of the namespace, hexadecimal."""
    model: str
    """Name or path of the model; may be empty."""
    requests: int = 0
    """Requests that restored tokens from the store."""
    tokens: int = 0
    """Prompt tokens whose KV was restored from the store."""
    prefill_tokens: int = 0
    """Tokens of the prefills whose time was measured."""
    prefill_s: float = 0.0
    """Seconds that the measured prefills took."""
    labels: dict[str, Restored] = {}
    """Label ``name=value`` → requests with the label that restored tokens; a request with several
    labels counts for each. Long labels, and those beyond 256 a day and engine, are left out."""

    def add(self, other: Savings) -> None:
        """Add the numbers of another object of the same namespace."""
        self.requests += other.requests
        self.tokens += other.tokens
        self.prefill_tokens += other.prefill_tokens
        self.prefill_s += other.prefill_s
        for label, restored in other.labels.items():
            self.add_label(label, restored)

    def add_label(self, label: str, restored: Restored) -> None:
        if label in self.labels:
            self.labels[label].add(restored)
        elif len(self.labels) < MOST_LABELS:
            self.labels[label] = Restored(restored.requests, restored.tokens)

    def seconds(self, tokens: int) -> float | None:
        """Return the seconds that a prefill of so many tokens would take; None: no prefill was
        measured."""
        if not self.prefill_tokens:
            return None
        return tokens * self.prefill_s / self.prefill_tokens


# made at import, because two threads may use it first at the same time
_DECODE = msgspec.msgpack.Decoder(Savings).decode


class SavingsRecorder:
    """Adds up the savings of one engine, the tokens that its requests restored, and writes the sums
    of each day into a note of the store, its source.

    :param backend: the store; a read-only one records nothing.
    """

    def __init__(self, backend: Backend, identity: Identity) -> None:
        self._backend = backend
        self._namespace = identity.digest
        self._model = identity.model_name
        self._folded_day = 0
        """The day on which this object last folded older notes (``fold``): number of days since the
        epoch; 0: never."""
        self._num_added = 0
        """Number of calls of ``add``."""
        self._num_written = 0
        """Number of calls of ``add`` whose counts are surely in a note of the store."""
        # sets ``_day``, ``_name`` and ``_total``
        self._begin(today())
        self.prefill = (0, 0.0)
        """Tokens and seconds of the measured prefills in this namespace, as recorded when the store
        was opened; 0 if none is known, and in a remote store, whose answer would take time."""
        is_remote = backend.capabilities.remote
        self.interval_s = _REMOTE_S if is_remote else _LOCAL_S
        """Seconds between two calls of ``write``."""
        if not is_remote:  # waiting for the answer would delay the opening
            self._read_prefill()

    def _read_prefill(self) -> None:
        """Read how many tokens engines have computed in this namespace, and in which time."""
        try:
            totals = read_savings(self._backend)
        except StoreError as error:
            logger.info("savings cannot be read: %s", str(error))
            return
        for total in totals:
            if total.namespace == self._namespace.hex():
                self.prefill = (total.prefill_tokens, total.prefill_s)

    def _begin(self, day: int) -> None:
        """Begin a source, the note of this engine for one day, with a new random name and empty
        totals."""
        self._day = day
        """Day of the source: number of days since the epoch."""
        source = secrets.token_hex(8)
        self._name = _source_name(day, self._namespace, source)
        """Name of the source's note."""
        self._total = Savings(self._namespace.hex(), self._model)
        """Sums of all calls of ``add`` since the source began."""

    def add(
        self,
        restored_tokens: int,
        labels: Mapping[str, str],
        prefill_tokens: int,
        prefill_s: float,
    ) -> None:
        """Add the restored tokens of a request, and a measured prefill; either may be 0.

        Counts go to this engine's source, the note that ``write`` writes. Each day begins a new
        source with empty totals.
        """
        day = today()
        is_all_written = self._num_added == self._num_written
        # A new source begins with empty totals: continue the previous one until its totals are
        # written.
        if day != self._day and is_all_written:
            self._begin(day)
        self._total.prefill_tokens += prefill_tokens
        self._total.prefill_s += prefill_s
        if restored_tokens:
            self._add_restored(restored_tokens, labels)
        # count it last: a write that runs during this call may not include all of its numbers
        self._num_added += 1

    def _add_restored(
        self,
        tokens: int,
        labels: Mapping[str, str],
    ) -> None:
        """Add the restored tokens of one request to the totals, and to those of its labels."""
        restored = Restored(requests=1, tokens=tokens)
        self._total.requests += 1
        self._total.tokens += tokens
        for name, value in labels.items():
            # leave a long label out: a note has room for 256 labels of 128 bytes
            label = f"{name}={value}"
            if len(label.encode()) <= _MOST_LABEL_BYTES:
                self._total.add_label(label, restored)

    def write(self) -> None:
        """Write the counts since the last call; a failure is logged, and the next call writes
        it. Blocks; ``add`` may run in another thread meanwhile."""
        # Read the number before the totals are encoded: they include at least these calls. Later
        # calls stay due.
        num_added = self._num_added
        is_all_written = num_added == self._num_written
        if is_all_written or not self._backend.capabilities.writable:
            return
        day = today()
        content = msgspec.msgpack.encode(self._total)
        try:
            self._backend.put_note(STORE, self._name, content)
            self._num_written = num_added
            # once a day
            if day != self._folded_day:
                fold(self._backend, day - _FINAL_DAYS)
                self._folded_day = day
        except StoreError as error:
            logger.info("savings are written later: %s", str(error))


def add_savings(
    backend: Backend,
    identity: Identity,
    source: str,
    part: Savings,
) -> None:
    """Add savings to the note of a source of this day; a failure is logged. Blocks. A read-only
    store records nothing.

    :param source: 16 hexadecimal digits, drawn at random, which only one thread uses at a time.
    """
    if not backend.capabilities.writable:
        return
    name = _source_name(today(), identity.digest, source)
    namespace = identity.digest.hex()
    try:
        recorded = _sum_of_notes([backend.note(STORE, name)])
        total = recorded.get(namespace)
        if total is None:
            # the day has no note yet, or a damaged one
            total = Savings(namespace, identity.model_name)
        total.add(part)
        content = msgspec.msgpack.encode(total)
        backend.put_note(STORE, name, content)
    except StoreError as error:
        logger.info("savings are not recorded: %s", str(error))


def _source_name(
    day: int,
    namespace: bytes,
    source: str,
) -> str:
    """Return the name of a source's note, which ``_NAME`` matches."""
    return f"s{day:05}{namespace.hex()[:8]}{source}"


def today() -> int:
    """Return the number of the present day (UTC) since the epoch."""
    return int(time.time() // _DAY_S)


def fold(backend: Backend, last_day: int) -> None:
    """Replace the sources of each day up to ``last_day`` by one note for each namespace.

    :raises StoreError: the medium failed; nothing is lost, and the call can be repeated.
    """
    for sum_name, sources in _final_sources(backend, last_day).items():
        # the sum is durable before the sources are deleted
        has_sum = _ensure_sum(backend, sum_name, sources)
        if has_sum:
            for name in sources:
                backend.put_note(STORE, name, None)


def _final_sources(
    backend: Backend,
    last_day: int,
) -> dict[str, list[str]]:
    """Group the sources of the days up to ``last_day`` by day and namespace.

    :returns: name of the note that will have the sum of a group → names of its sources.
    """
    sources: dict[str, list[str]] = {}
    for name in backend.note_names(STORE):
        found = _NAME.fullmatch(name)
        if found is None or found["source"] == _FOLDED:
            continue
        if int(found["day"]) <= last_day:
            sum_name = name.removesuffix(found["source"]) + _FOLDED
            sources.setdefault(sum_name, []).append(name)
    return sources


def _ensure_sum(
    backend: Backend,
    sum_name: str,
    sources: Sequence[str],
) -> bool:
    """Write the sum of the sources into a note, unless it exists. Return whether it exists now;
    False: the sum is not known, so the sources must stay."""
    # An existing sum includes all sources of its day: it was written before the first of them was
    # deleted, and when no further ones could begin. A source that is written more than two days
    # late is not counted.
    if backend.note(STORE, sum_name) is not None:
        return True
    contents = list(backend.notes(STORE, sources))
    if None in contents:
        # another engine, which folds the same sources, has deleted some
        return False
    totals = _sum_of_notes(contents)
    if len(totals) != 1:
        # All notes are damaged, or they are of several namespaces: their names contain only the
        # first eight digits of the namespace, which several namespaces may share.
        return False
    (total,) = totals.values()
    content = msgspec.msgpack.encode(total)
    backend.put_note(STORE, sum_name, content)
    return True


def read_savings(backend: Backend) -> list[Savings]:
    """Return the savings of a store for each namespace that has any, most restored tokens first.

    :raises StoreError: the medium failed.
    """
    contents: list[bytes | None] = []
    # A fold replaces the sources of a day by their sum. If it deletes sources between the two
    # reads, the counters would fall for a while: only the last attempt accepts that.
    for _ in range(_READ_ATTEMPTS):
        names = _counted_names(backend)
        contents = list(backend.notes(STORE, names))
        is_complete = None not in contents
        if is_complete:
            break
    totals = _sum_of_notes(contents).values()
    return sorted(totals, key=attrgetter("tokens"), reverse=True)


def _counted_names(backend: Backend) -> list[str]:
    """Return the names of the notes that count: the folded ones, and the sources of days that are
    not folded. Sources of a folded day may still exist for a while."""
    # (name of a source, name of the folded note of its day and namespace)
    sources: list[tuple[str, str]] = []
    counted: list[str] = []
    for name in backend.note_names(STORE):
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        if found["source"] == _FOLDED:
            counted.append(name)
            continue
        sum_name = name.removesuffix(found["source"]) + _FOLDED
        sources.append((name, sum_name))
    folded_names = set(counted)
    for name, sum_name in sources:
        if sum_name not in folded_names:
            counted.append(name)
    return counted


def _sum_of_notes(contents: Iterable[bytes | None]) -> dict[str, Savings]:
    """Return the sum of notes, by namespace; damaged and missing ones do not count."""
    totals: dict[str, Savings] = {}
    for content in contents:
        if content is None:
            continue
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            part = _DECODE(content)
            if part.namespace not in totals:
                totals[part.namespace] = Savings(part.namespace, part.model)
            totals[part.namespace].add(part)
    return totals
