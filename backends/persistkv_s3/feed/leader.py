"""The leader of a store: merges the inboxes into one feed per namespace, and deletes objects that are no longer needed.

1. A handle is elected by a conditional write of the head. A leader whose head stays the same for ``TAKEOVER_S`` on an
   observer's monotonic clock is replaced. An idle leader resigns.
2. A round lists the inbox, writes a feed object for each namespace with new commits, and then the head, which publishes
   all of them. A feed object is valid only if the head names it. Only merged commits are deleted from the inbox.
3. A feed object that was written and not published is published unchanged by a later round of the same term, or never.
4. Evictions are entries of the feed. Each round does a bounded amount of maintenance, for one namespace.
5. A removed or superseded object is deleted if nothing refers to it, and only after the time ``grace`` (an option) has
   passed since the head published its removal.
6. A sweep deletes objects that nothing refers to and that were over a day old when this leader last wrote the head. No
   later commit can refer to them: a commit whose uploads began more than 12 hours before is rejected.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice

import msgspec

from persistkv_s3.client.transport import ABSENT, ConditionFailedError, ObjectInfo, ObjectMissingError
from persistkv_s3.feed.format import (
    LATEST,
    MAX_FEED_BYTES,
    MAX_INBOX_BYTES,
    NONCE_BYTES,
    TERM_BYTES,
    WRITER_BYTES,
    Entry,
    Feed,
    Head,
    InboxName,
    NamespaceHead,
    Snapshot,
    feed_name,
    frame_records,
    parse_feed,
    parse_inbox,
    parse_pack,
    seal,
    split_ids,
)
from persistkv_s3.feed.head import DamagedHeadError, HeadVersion, NoSuccessorError, StoreHead
from persistkv_s3.session import NamespaceSession, is_rejected

logger = logging.getLogger(__name__)

TAKEOVER_S = 15.0
ROUND_S = 1.0
"""Minimum time between two rounds of the leader."""
_HEARTBEAT_S = 5.0
_RESIGN_S = 30.0  # without a commit of this engine
_SWEEP_S = 24 * 3600.0  # 24 hours
SNAPSHOT_AFTER = 64
"""Minimum number of feed objects between two snapshots of a namespace."""
_NAMED_BEFORE = 128  # feed objects before a snapshot that the head still names, for readers that are a little behind
_MOST_TAILS = 48
_RECENT_BYTES = 1 << 20  # 1 MiB
_LEAST_DUMP_BYTES = 4 << 20  # 4 MiB
_SEGMENT_BYTES = 32 << 20  # 32 MiB
_EVICTED_AT_ONCE = 256
_DELETED_AT_ONCE = 1000
_MERGED_BYTES = MAX_FEED_BYTES // 2 - MAX_INBOX_BYTES


@dataclass
class _Publication:
    """Feed object and snapshot that a round publishes for one namespace."""

    feed: Feed
    snapshot: str = ""
    """Name of the new snapshot; empty: none."""
    snapshot_position: int = 0
    swept: float = 0.0
    """Start of the sweep that this round completes; 0: none."""


class Leader:
    """Leader of a store, if this handle is elected; see the top of this file. Used by one thread at a time.

    :param session: returns this handle's session with a namespace; None if the store has no such namespace.
    :param opened: open sessions of this handle, by namespace id.
    :param grace_s: seconds between the publication of an object's removal and its deletion.
    """

    def __init__(
        self,
        head: StoreHead,
        session: Callable[[bytes], NamespaceSession | None],
        opened: Mapping[bytes, NamespaceSession],
        grace_s: float,
    ) -> None:
        self._bucket = head.bucket
        self._clock = head.bucket.clock
        self._names = head.names
        self._head = head
        self._session = session
        self._opened = opened
        self._grace_s = grace_s
        self._term = b""
        self._unpublished: dict[bytes, _Publication] = {}
        self._junk: set[str] = set()
        self._behind: set[bytes] = set()
        """Namespaces with commits in the inbox that did not fit into the last round."""
        self._recent: dict[bytes, dict[int, bytes]] = {}
        """Small feed objects that this leader wrote since the last snapshot, encoded: namespace → position → bytes.
        Without them, a snapshot would delay a round by dozens of requests."""
        self._resigning = False
        self._busy_at = 0.0
        self._written_at = 0.0
        self._confirmed = 0.0
        """Server's time before the last successful write of the head."""
        self._turn = 0
        self._dumps: dict[bytes, Iterator[None]] = {}
        """Snapshots of all table rows in progress, by namespace; each step writes one object."""
        self._dumped: dict[bytes, list[str]] = {}
        """Names of the segments that a dump in progress has written."""
        self._sweeps: dict[bytes, Iterator[None]] = {}
        """Sweeps in progress, by namespace; each step deletes some objects."""

    @property
    def leads(self) -> bool:
        """Whether the newest known head names this handle as the leader."""
        return bool(self._term) and self._head.head.leader == self._term

    @property
    def may_elect(self) -> bool:
        """Whether this handle may run for election: there is no leader, or the head is unchanged for ``TAKEOVER_S``."""
        silent_s = self._clock.monotonic() - self._head.changed_at
        return not self._head.head.leader or silent_s > TAKEOVER_S

    def elect(self) -> bool:
        """Try to become the leader; return whether this succeeded.

        :raises S3Error: a request failed. This handle leads if a later poll finds that its write took effect.
        """
        base = self._head.version
        head = msgspec.structs.replace(base.head, epoch=base.head.epoch + 1)
        term = head.epoch.to_bytes(4, "big") + self._clock.random.randbytes(TERM_BYTES - 4)
        head.leader = term
        self._forget()
        self._term = term
        if self._write(head, base):
            logger.debug("elected in epoch %d", head.epoch)
            self._busy_at = self._clock.monotonic()
        return self.leads

    def _forget(self) -> None:
        self._term = b""
        self._unpublished.clear()
        self._recent.clear()
        self._dumps.clear()
        self._dumped.clear()
        self._sweeps.clear()

    def _write(self, head: Head, base: HeadVersion) -> bool:
        began, now = self._bucket.now(), self._clock.monotonic()
        try:
            written = self._head.write(head, base, self._term)
        except (ObjectMissingError, DamagedHeadError, NoSuccessorError):
            # The head was deleted, damaged or rebuilt. The handle polls and rebuilds it, and is elected again: under
            # the old term, the names of its unpublished feed objects are taken.
            self._forget()
            raise
        if written:
            self._confirmed, self._written_at = began, now
            return True
        if not self.leads:
            logger.info("another engine leads this store now")
            self._forget()
        return False

    def round(self) -> None:
        """Do one round of the leader: merge the inbox into the feeds, do some maintenance, and publish both.

        If an earlier round failed to publish its feed objects, publish only these. An idle leader resigns.

        :raises StoreError: the round failed; a later one continues.
        """
        for namespace, held in list(self._unpublished.items()):
            self._opened[namespace].sync()
            if held.feed.position <= self._opened[namespace].catalogue.position.position:
                del self._unpublished[namespace]  # a write with unknown outcome has published it after all
        if self._unpublished:
            self._publish()
            return
        by_namespace = self._listed()
        for namespace, found in by_namespace.items():
            session = self._session(namespace)
            if session is None:
                self._junk.update(info.key for info in found.values())
                continue
            session.sync()
            feed = self._merged(session, found)
            if feed is not None:
                self._unpublished[namespace] = _Publication(feed)
                if session.writer in feed.merged:  # an engine that only merges leaves that to the others
                    self._busy_at = self._clock.monotonic()
        if not self._resigning:
            self._maintain()
        if self._publish():
            self._clear_inbox(by_namespace)

    def resign(self) -> None:
        """Do a last round, and give up the leadership; if it fails, another handle takes over after ``TAKEOVER_S``."""
        self._resigning = True
        self.round()

    def _listed(self) -> dict[bytes, dict[InboxName, ObjectInfo]]:
        """Return the commits in the inbox with their listing entries, by namespace id; ignore invalid objects."""
        found: dict[bytes, dict[InboxName, ObjectInfo]] = {}
        junk = set[str]()
        for info in self._bucket.list(self._names.inbox_prefix):
            name = parse_inbox(info.key)
            if name is None or info.key in self._junk:
                junk.add(info.key)
            else:
                found.setdefault(name.namespace, {})[name] = info
        self._junk = junk
        return found

    def _merged(self, session: NamespaceSession, infos: dict[InboxName, ObjectInfo]) -> Feed | None:
        """Return a new feed object with those of the found commits that are not merged yet; None if there are none.
        Commits beyond a bound on the bytes are left to the next round.
        """
        new, total = list[InboxName](), 0
        self._behind.discard(session.namespace)
        for name in session.unmerged(infos):
            if infos[name].size > MAX_INBOX_BYTES:
                self._junk.add(infos[name].key)
                continue
            total += infos[name].size
            if new and total > _MERGED_BYTES:
                self._behind.add(session.namespace)
                break
            new.append(name)
        last: dict[bytes, int] = {}
        entries: list[Entry] = []
        for name, entry in zip(new, self._bucket.all(session.read_commit, new), strict=True):
            if entry is None:
                self._junk.add(self._names.inbox(name))
                continue
            last[name.writer] = max(name.number, last.get(name.writer, 0))
            if is_rejected(entry, infos[name]):
                logger.warning("rejected a commit that took %.0f h", (infos[name].modified - entry.time) / 3600)
            else:
                entries.append(entry)
        return self._feed(session, entries, last) if last else None

    def _feed(self, session: NamespaceSession, entries: list[Entry], merged: dict[bytes, int]) -> Feed:
        at, held = session.catalogue.position, self._head.head.namespaces.get(session.namespace)
        generation = self._clock.random.randbytes(NONCE_BYTES) if held is None else held.generation
        return Feed(
            generation=generation,
            position=at.position + 1,
            term=self._term,
            previous=at.term,
            time=max(self._bucket.now(), at.time),
            merged=merged,
            entries=entries,
        )

    def _publish(self) -> bool:
        """Write the unpublished feed objects, then the head; without any, the head only for a heartbeat or to resign.
        Return False if another handle leads.
        """
        base = self._head.version  # another thread may read a newer version during the uploads below
        if base.head.leader != self._term:
            logger.info("another engine leads this store now")
            self._forget()
            return False
        head = msgspec.structs.replace(base.head, namespaces=dict(base.head.namespaces))
        now = self._clock.monotonic()
        resigns = self._resigning or (now - self._busy_at > _RESIGN_S and not self._dumps)
        if not (self._unpublished or resigns or now - self._written_at >= _HEARTBEAT_S):
            return True
        for namespace, held in self._unpublished.items():
            session = self._opened[namespace]
            name, data = feed_name(held.feed.position, held.feed.term), seal(held.feed)
            with suppress(ConditionFailedError):  # an earlier attempt has written it: only this leader uses its term
                session.objects.put(name, [data], condition=ABSENT)
            if len(data) <= _RECENT_BYTES:
                self._recent.setdefault(namespace, {})[held.feed.position] = data
            head.namespaces[namespace] = self._extended(head.namespaces.get(namespace), held, session)
        if resigns:
            head.leader = b""
        written = self._write(head, base)
        if written:
            for namespace, held in self._unpublished.items():
                self._opened[namespace].catalogue.apply_feed(held.feed)
                self._opened[namespace].sync()
            self._unpublished.clear()
        if resigns:
            self._forget()
        return written

    def _extended(self, before: NamespaceHead | None, held: _Publication, session: NamespaceSession) -> NamespaceHead:
        feed = held.feed
        head = NamespaceHead(generation=feed.generation) if before is None else msgspec.structs.replace(before)
        head.append(feed.position, feed.term)
        head.num_bytes, head.oldest, expires = session.catalogue.retention()
        head.expires = min(expires, LATEST)
        head.swept = max(head.swept, held.swept) or self._bucket.now()
        if held.snapshot:
            head.snapshot, head.snapshot_position = held.snapshot, held.snapshot_position
            first = held.snapshot_position - _NAMED_BEFORE
            head.spans = [(max(begin, first), end, term) for begin, end, term in head.spans if end >= first]
        return head

    def _clear_inbox(self, by_namespace: dict[bytes, dict[InboxName, ObjectInfo]]) -> None:
        done: list[str] = []
        for namespace, found in by_namespace.items():
            merged = self._opened[namespace].catalogue.merged() if namespace in self._opened else {}
            done += [info.key for name, info in found.items() if name.number <= merged.get(name.writer, 0)]
        self._bucket.delete(done)

    # Maintenance: one namespace in each round

    def _maintain(self) -> None:
        """Do the maintenance of one round: evict; then snapshot one open namespace and delete its unneeded objects."""
        head = self._head.head
        self._evict(head)
        names = sorted(head.namespaces.keys() & self._opened.keys())
        if names:
            namespace = names[self._turn % len(names)]
            self._turn += 1
            session, target = self._opened[namespace], head.namespaces[namespace]
            session.sync()
            if namespace in self._dumps:
                _advance(self._dumps, namespace)
            elif target.position - target.snapshot_position >= SNAPSHOT_AFTER:
                self._take_snapshot(session, target)
            self._collect(session)
            damaged = session.catalogue.position.damaged
            if namespace not in self._behind:  # commits in the inbox may name old objects
                if namespace in self._sweeps:
                    _advance(self._sweeps, namespace)
                elif self._bucket.now() - target.swept >= _SWEEP_S and not damaged:
                    self._sweeps[namespace] = self._sweep(session)

    def _addition(self, session: NamespaceSession) -> _Publication:
        """Return the publication of a namespace in this round, which may be added to; create it if necessary."""
        if session.namespace not in self._unpublished:
            self._unpublished[session.namespace] = _Publication(self._feed(session, [], {}))
        return self._unpublished[session.namespace]

    def _evict(self, head: Head) -> None:
        """Add evictions to the next feed object of one namespace. If content exceeds the capacity or the store's ttl,
        this is the namespace with the oldest use, otherwise one with manifests whose own ttl has passed.
        """
        fresh = {name: self._fresh(name, held) for name, held in head.namespaces.items()}
        oldest = sorted((old, name) for name, (_, old, _) in fresh.items() if old)
        now, capacity, ttl_s = self._bucket.now(), head.capacity, head.ttl_s
        excess = 0 if capacity is None else sum(size for size, _, _ in fresh.values()) - capacity
        if oldest and (excess > 0 or (ttl_s is not None and oldest[0][0] < now - ttl_s)):
            namespace, until = oldest[0][1], oldest[1][0] if len(oldest) > 1 else now
        else:
            expires, namespace = min(((expires, name) for name, (_, _, expires) in fresh.items()), default=(now, b""))
            if expires >= now:
                return
            ttl_s, excess, until = None, 0, now
        session = self._session(namespace)
        if session is None:
            return
        session.sync()
        gone, manifests = session.catalogue.plan_eviction(now, ttl_s, excess, until, _EVICTED_AT_ONCE)
        held = self._unpublished.get(namespace)
        used = set() if held is None else _used(held.feed.entries)
        gone = [pack for pack in gone if pack[0] not in used]
        if gone or manifests:
            writer = bytes(WRITER_BYTES)
            entry = Entry(writer=writer, number=0, time=now, gone=gone, manifests_gone=manifests)
            self._addition(session).feed.entries.insert(0, entry)
            logger.info("evicting %d packs", len(gone))

    def _fresh(self, namespace: bytes, held: NamespaceHead) -> tuple[int, float, float]:
        """Return ``Catalogue.retention`` if the local catalogue has the position of the head, else that of the head."""
        session = self._opened.get(namespace)
        if session is None or session.catalogue.position.position != held.position:
            return held.num_bytes, held.oldest, held.expires
        return session.catalogue.retention()

    def _take_snapshot(self, session: NamespaceSession, target: NamespaceHead) -> None:
        """Write a snapshot: the content of the previous one and the feed objects after it. If these are large or many,
        start a snapshot of all rows.
        """
        before = session.snapshot(target)
        is_lost = before is None and bool(target.snapshot)  # its segments are known to nobody any more
        if before is None:
            before = Snapshot(generation=target.generation, position=0, term=bytes(TERM_BYTES), time=0.0)
        covered = range(target.snapshot_position + 1, target.position + 1)
        wanted = [(position, term) for position in covered if (term := target.term_of(position)) is not None]
        known = self._recent.pop(session.namespace, {})
        for feed in self._bucket.all(session.feed_object, [name for name in wanted if name[0] not in known]):
            if feed is not None:
                known[feed.position] = seal(feed)
        pieces = frame_records([known[position] for position, _ in wanted if position in known])
        name = f"segments/{target.position:012x}-{self._term.hex()}"
        session.objects.put(name, pieces)
        at = session.catalogue.position
        snapshot = msgspec.structs.replace(
            before,
            position=at.position,
            term=at.term,
            time=at.time,
            tails=[*before.tails, name],
            tail_bytes=before.tail_bytes + sum(len(memoryview(piece)) for piece in pieces),
        )
        retired = [feed_name(*name) for name in wanted]
        self._put_snapshot(session, target, snapshot, retired)
        heavy = snapshot.tail_bytes > max(_LEAST_DUMP_BYTES, snapshot.base_bytes // 2)
        if (heavy or is_lost or len(snapshot.tails) >= _MOST_TAILS) and not at.damaged:
            self._dumps[session.namespace] = self._dump(session, snapshot)

    def _dump(self, session: NamespaceSession, replaced: Snapshot) -> Iterator[None]:
        """Write all table rows of a catalogue, one segment object per step. In the last step, write the snapshot that
        names them instead of the segments of ``replaced``.
        """
        nonce, size = self._clock.random.randbytes(NONCE_BYTES).hex(), 0
        done = self._dumped[session.namespace] = list[str]()
        for number, (position, dump) in enumerate(session.catalogue.dump(_SEGMENT_BYTES)):
            name, data = f"segments/{position.position:012x}-{nonce}-{number:04x}", seal(dump)
            session.objects.put(name, frame_records([data]))
            done.append(name)
            size += len(data)
            yield
        del self._dumped[session.namespace]
        target = self._head.head.namespaces.get(session.namespace)
        before = None if target is None else session.snapshot(target)
        if target is None or before is None or before.tails[: len(replaced.tails)] != replaced.tails:
            return
        snapshot = msgspec.structs.replace(
            before,
            base=done,
            base_bytes=size,
            tails=before.tails[len(replaced.tails) :],
            tail_bytes=before.tail_bytes - replaced.tail_bytes,
        )
        self._put_snapshot(session, target, snapshot, [*before.base, *replaced.tails])

    def _put_snapshot(
        self, session: NamespaceSession, target: NamespaceHead, snapshot: Snapshot, retired: list[str]
    ) -> None:
        nonce = self._clock.random.randbytes(NONCE_BYTES).hex()
        name = f"snapshots/{snapshot.position:012x}-{self._term.hex()}-{nonce}"
        session.objects.put(name, [seal(snapshot)])
        held = self._addition(session)
        held.feed.retired += [*retired, *([target.snapshot] if target.snapshot else [])]
        held.snapshot, held.snapshot_position = name, snapshot.position

    def _collect(self, session: NamespaceSession) -> None:
        """Delete a namespace's objects whose removal was published at least ``grace`` seconds ago, at most about 1,000,
        unless something refers to them again.
        """
        garbage = session.catalogue.garbage(self._confirmed - self._grace_s, _DELETED_AT_ONCE)
        if not garbage:
            return
        base = session.objects.names.base
        self._bucket.delete([base + name for _, name in garbage if not self._is_named(session, name)])
        feed = self._addition(session).feed
        feed.collected = max(feed.collected, garbage[-1][0])

    def _sweep(self, session: NamespaceSession) -> Iterator[None]:
        """Of all objects of a namespace, 1,000 per step, delete those over a day old without references."""
        began, base = self._bucket.now(), session.objects.names.base
        listing = self._bucket.list(base)
        while page := list(islice(listing, _DELETED_AT_ONCE)):
            before = self._confirmed - _SWEEP_S
            old = [info.key for info in page if info.modified < before]
            self._bucket.delete([key for key in old if not self._is_named(session, key.removeprefix(base))])
            yield
        self._addition(session).swept = began

    def _is_named(self, session: NamespaceSession, name: str) -> bool:
        """Return whether the catalogue, an unpublished feed object or the head refers to an object; True if unsure."""
        kind = name.partition("/")[0]
        held = self._unpublished.get(session.namespace)
        entries = [] if held is None else held.feed.entries
        target = self._head.head.namespaces.get(session.namespace)
        if kind == "packs" and (pack := parse_pack(name)) is not None:
            added = any((row.pack_id, row.nonce) == pack for entry in entries for row in entry.packs)
            return added or session.catalogue.names_pack(*pack)
        if kind == "keys":
            added = any(row.keys == name for entry in entries for row in entry.manifests)
            return added or session.catalogue.names_keys(name)
        if kind == "feed" and (feed := parse_feed(name)) is not None:
            return target is None or (feed[0] > target.snapshot_position and target.term_of(feed[0]) == feed[1])
        if kind in ("snapshots", "segments"):
            snapshot = None if target is None else session.snapshot(target)
            if target is None or snapshot is None:
                return True
            done = self._dumped.get(session.namespace, ())
            return name in (target.snapshot, *snapshot.base, *snapshot.tails, *done)
        return True


def _advance(tasks: dict[bytes, Iterator[None]], namespace: bytes) -> None:
    """Do the next step of a task; forget the task if it has ended, or failed in an earlier step."""
    if next(tasks[namespace], True):
        del tasks[namespace]


def _used(entries: list[Entry]) -> set[bytes]:
    """Return the ids of the packs that commits write or use, or that their manifests refer to."""
    found = {row.pack_id for entry in entries for row in entry.packs}
    for entry in entries:
        for joined in (*entry.uses, *(row.packs for row in entry.manifests)):
            found.update(split_ids(joined))
    return found
