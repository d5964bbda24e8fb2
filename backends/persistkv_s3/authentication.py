"""Authentication of a bucket's content with HMAC-SHA256 and a key that the engines of a store share.

1. The bytes of a frame are served only with their tag. It covers the bytes, their place in the pack, and the pack's
   whole table: identity (as namespace), keys, codec, checksums.
2. The head, identities, notes, commits, feed objects, snapshots with their segments, and keys of manifests are accepted
   only with their tag. It covers their kind and name, so that none can replace another. Statuses of engines have none.

Without a key nothing is authenticated: there are no tags.
"""

from __future__ import annotations

import hmac
import logging
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackTable
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.client.transport import ObjectMissingError
from persistkv_s3.feed.format import Names, belongs, unseal

T = TypeVar("T")

logger = logging.getLogger(__name__)

TAG_BYTES = 32
_DERIVED_FOR = b"persistkv s3 authentication 1"
_NUMBER = struct.Struct("<I")


class Authenticator:
    """Makes and verifies authentication tags, see the top of this file. Thread-safe.

    :param secret: shared by the engines; empty: no key, and nothing is authenticated.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = hmac.digest(_DERIVED_FOR, secret, "sha256") if secret else b""
        self.key_id = self._tag(b"key id", ()).hex()[:16] if secret else ""
        """Identifies the key without revealing it. Empty without a key."""

    def signed(self, namespace: bytes, name: str, pieces: Sequence[Buffer]) -> list[Buffer]:
        """Return the pieces of an object, followed by its authentication tag if there is a key.

        :param namespace: id of the object's namespace; ``NO_NAMESPACE`` for the head and for identities.
        :param name: name that the tag covers.
        """
        return [*pieces, self._object_tag(namespace, name, pieces)] if self._key else [*pieces]

    def opened(self, namespace: bytes, name: str, data: Buffer) -> memoryview:
        """Verify the authentication tag of an object, as ``signed`` returned it; return the object without it.

        :raises CorruptPackError: the object was written without the key, or under another name.
        """
        view = memoryview(data)
        if not self._key:
            return view
        end = max(0, len(view) - TAG_BYTES)
        body, tag = view[:end], view[end:]
        if not hmac.compare_digest(tag, self._object_tag(namespace, name, [body])):
            raise CorruptPackError("authentication", "not written with the key")
        return body

    def _object_tag(self, namespace: bytes, name: str, pieces: Iterable[Buffer]) -> bytes:
        encoded = name.encode()
        return self._tag(b"object", [namespace, _NUMBER.pack(len(encoded)), encoded, *pieces])

    def pack_tags(self, table: PackTable, payload: Sequence[Buffer]) -> bytes:
        """Return the tags between payload and table of a pack, of 32 bytes each: one per frame, then one of the table
        and the frame tags. Without a key there are none.
        """
        if not self._key:
            return b""
        digest = sha256(table.encode()).digest()
        stored = slices(payload, ((frame.offset, frame.stored_length) for frame in table.frames))
        tags = b"".join(self._frame_tag(digest, number, pieces) for number, pieces in enumerate(stored))
        return tags + self._tag(b"table", [digest, tags])

    def frame_check(self, table: PackTable, tags: bytes) -> Callable[[int, Iterable[Buffer]], bool]:
        """Return a function of a frame's index and stored bytes: whether the frame has a valid tag, or needs none."""
        if not self._key:
            return lambda number, stored: True
        digest = sha256(table.encode()).digest()

        def is_ours(number: int, stored: Iterable[Buffer]) -> bool:
            found = tags[TAG_BYTES * number : TAG_BYTES * (number + 1)]
            return hmac.compare_digest(found, self._frame_tag(digest, number, stored))

        return is_ours

    def _frame_tag(self, digest: bytes, number: int, stored: Iterable[Buffer]) -> bytes:
        return self._tag(b"frame", [digest, _NUMBER.pack(number), *stored])

    def _tag(self, kind: bytes, parts: Iterable[Buffer]) -> bytes:
        """Return the HMAC of ``kind`` and ``parts``. A tag of one kind is never valid for content of another kind.
        Within a kind, all parts except the last have a fixed or encoded length.
        """
        mac = hmac.new(self._key, kind + b"\0", "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()


class SignedObjects:
    """Reads and writes whole objects of one namespace, with their authentication tags. Thread-safe.

    :param names: constructs the S3 keys. Their ``namespace`` is ``NO_NAMESPACE`` for objects of the whole store.
    """

    def __init__(self, bucket: Bucket, names: Names, authenticator: Authenticator) -> None:
        self.bucket = bucket
        self.names = names
        self.authenticator = authenticator

    def put(self, name: str, pieces: Sequence[Buffer], *, condition: str | None = None) -> None:
        """Write the object with a name, which the tag covers; see ``Bucket.put``."""
        signed = self.authenticator.signed(self.names.namespace, name, pieces)
        self.bucket.put(self.names.base + name, signed, condition=condition)

    def get(self, name: str, limit: int, key: str = "") -> memoryview:
        """Download and verify an object of at most ``limit`` bytes; return it without its authentication tag.

        :param name: name that the tag covers, and the object's name unless its S3 key is given, too.
        :raises ObjectMissingError: there is no such object.
        :raises CorruptPackError: the object is too large, or not written with the key.
        """
        data = self.bucket.get(key or self.names.base + name, limit)
        return self.authenticator.opened(self.names.namespace, name, data)

    def record(self, name: str, kind: type[T], limit: int, *, key: str = "", may_be_missing: bool = False) -> T | None:
        """Return a sealed record; None, with a warning, if it is unreadable or belongs under another name. See ``get``.

        :param may_be_missing: return None for a missing object instead of raising ``ObjectMissingError``.
        """
        try:
            record = unseal(self.get(name, limit, key), kind)
            if belongs(record, name):
                return record
            raise CorruptPackError(kind.__name__, "content of another name")
        except CorruptPackError as error:
            logger.warning("%s is unreadable (%s)", key or self.names.base + name, error)
        except ObjectMissingError:
            if not may_be_missing:
                raise
        return None


def slices(buffers: Iterable[Buffer], ranges: Iterable[tuple[int, int]]) -> Iterator[list[memoryview]]:
    """Yield the bytes of each range (offset, length) in the joined buffers, without a copy. Ranges must ascend
    and be within the buffers.
    """
    parts = (memoryview(buffer).cast("B") for buffer in buffers if memoryview(buffer).nbytes)
    part, begin = memoryview(b""), 0
    for offset, length in ranges:
        found: list[memoryview] = []
        while length:
            while begin + len(part) <= offset:
                begin += len(part)
                part = next(parts)
            found.append(part[offset - begin : offset - begin + length])
            offset += len(found[-1])
            length -= len(found[-1])
        yield found
