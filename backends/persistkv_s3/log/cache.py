"""Local cache of a namespace's state: a restarted engine fetches only newer entries.

1. It may be lost at any time, and is used only if it is complete, authentic, and of the same namespace and store.
2. It is replaced atomically.
3. It holds all entries of the segments that its root references; segments never change.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from struct import Struct
from typing import NamedTuple

import xxhash

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.files import replace_file
from persistkv_s3.authentication import Authenticator
from persistkv_s3.log.layout import Root, encode_entries, encode_root, parse_entries, parse_root_object
from persistkv_s3.log.state import LogState

logger = logging.getLogger(__name__)

_MAGIC = b"PKVS3CA1"
_HEAD = Struct("<8sQI")
_SIGNED_AS = "cache"
_PAUSE_S = 60.0
_SHARE = 100  # pause between writes, as a multiple of the duration of the last one


class Cached(NamedTuple):
    """Content of a cache file."""

    root: Root
    state: LogState
    """All entries of the root's segments, possibly with later ones."""


class IndexCache:
    """Cache file of one namespace of one store. Used from one thread at a time. An unusable file is ignored.

    :param directory: None: no cache.
    :param place: distinguishes the namespace from all others that this user may open.
    """

    def __init__(self, directory: Path | None, place: str, namespace: bytes, authenticator: Authenticator) -> None:
        self._path = None if directory is None else directory / sha256(place.encode()).hexdigest()[:32]
        self._namespace = namespace
        self._authenticator = authenticator
        self._segments: Sequence[str] = ()
        self._not_before = 0.0

    def load(self) -> Cached | None:
        """Return the cached state; None if there is none, or it is unusable."""
        if self._path is None:
            return None
        try:
            found = self._parse(self._path.read_bytes())
        except OSError:
            return None
        except CorruptPackError as error:
            logger.info("%s is unusable (%s): fetching the index", self._path, error)
            return None
        self._segments = found.root.segments
        return found

    def _parse(self, data: bytes) -> Cached:
        body = self._authenticator.opened(self._namespace, _SIGNED_AS, data)
        if len(body) < _HEAD.size:
            raise CorruptPackError("cache", f"{len(body)} bytes are too few")
        magic, checksum, root_length = _HEAD.unpack_from(body)
        rest = body[_HEAD.size :]
        if magic != _MAGIC or xxhash.xxh3_64_intdigest(rest) != checksum:
            raise CorruptPackError("cache", "it is not what was written")
        root = parse_root_object(rest[:root_length], self._namespace, None)
        state = LogState()
        for entry in parse_entries(rest[root_length:], self._namespace):
            state.merge(entry)
        return Cached(root, state)

    def save_if_due(self, root: Root | None, state: LogState) -> None:
        """Write the state as in ``save``, unless the last write is too recent."""
        if time.monotonic() >= self._not_before:
            self.save(root, state)

    def save(self, root: Root | None, state: LogState) -> None:
        """Write the state if the root references other segments than the file."""
        if self._path is None or root is None or root.segments == self._segments or state.damaged:
            return
        begin = time.monotonic()
        self._segments = root.segments
        sealed = encode_root(root)
        pieces: list[Buffer] = [sealed, *encode_entries(state.entries(self._namespace))]
        digest = xxhash.xxh3_64()
        for piece in pieces:
            digest.update(piece)
        head = _HEAD.pack(_MAGIC, digest.intdigest(), len(sealed))
        try:
            replace_file(self._path, self._authenticator.signed(self._namespace, _SIGNED_AS, [head, *pieces]))
        except OSError as error:
            logger.info("%s cannot be written (%s)", self._path, error)
        self._not_before = time.monotonic() + max(_PAUSE_S, _SHARE * (time.monotonic() - begin))
