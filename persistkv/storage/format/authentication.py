"""Authentication of a shared store's content with HMAC-SHA256 and a key that its engines share.

1. The bytes of a frame are served only with their tag. It covers the bytes, their place in the
   pack, and the pack's whole table: identity (as namespace), keys, codec, checksums.
2. Other objects are accepted only with their tag. It covers their namespace and name, so that none
   can replace another.

Without a key nothing is authenticated: there are no tags.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.pack import PackTable

TAG_BYTES = 32
_DERIVED_FOR = b"persistkv s3 authentication 1"
_NUMBER = struct.Struct("<I")


class Authenticator:
    """Makes and verifies authentication tags, see the top of this file. Thread-safe.

    :param secret: shared by the engines; empty: no key, and nothing is authenticated.
    """

    def __init__(self, secret: bytes = b"") -> None:
        self._key = b""
        self.key_id = ""
        """Identifies the key without revealing it. Empty without a key."""
        if secret:
            # derived, so that the secret may serve another purpose, too
            self._key = hmac.digest(_DERIVED_FOR, secret, "sha256")
            key_tag = self._tag(b"key id", ())
            self.key_id = key_tag.hex()[:16]

    def signed(
        self, namespace: bytes, name: str, pieces: Sequence[Buffer]
    ) -> list[Buffer]:
        """Return the pieces of an object, followed by its authentication tag if there is a key.

        :param namespace: id of the object's namespace; 16 zero bytes for objects of the whole
            store.
        :param name: name that the tag covers.
        """
        signed = list(pieces)
        if self._key:
            signed.append(self._object_tag(namespace, name, pieces))
        return signed

    def opened(self, namespace: bytes, name: str, data: Buffer) -> memoryview:
        """Verify the authentication tag of an object, as ``signed`` returned it; return the object
        without it.

        :raises CorruptPackError: the object was written without the key, or under another name.
        """
        view = memoryview(data)
        if not self._key:
            return view
        # an object shorter than a tag has an empty body, and fails the comparison
        end = max(0, len(view) - TAG_BYTES)
        body = view[:end]
        expected = self._object_tag(namespace, name, [body])
        if not hmac.compare_digest(view[end:], expected):
            raise CorruptPackError("authentication", "not written with the key")
        return body

    def _object_tag(
        self, namespace: bytes, name: str, pieces: Iterable[Buffer]
    ) -> bytes:
        encoded = name.encode()
        # with its length, so that no byte can move between the name and the content
        length = _NUMBER.pack(len(encoded))
        return self._tag(b"object", [namespace, length, encoded, *pieces])

    def pack_tags(self, table: PackTable, payload: Sequence[Buffer]) -> bytes:
        """Return the tags between payload and table of a pack, of 32 bytes each: one per frame,
        then one of the table and the frame tags. Without a key there are none.
        """
        if not self._key:
            return b""
        table_digest = sha256(table.encode()).digest()
        spans = [(frame.offset, frame.stored_length) for frame in table.frames]
        tags = b""
        for number, stored in enumerate(slices(payload, spans)):
            tags += self._frame_tag(table_digest, number, stored)
        table_tag = self._tag(b"table", [table_digest, tags])
        return tags + table_tag

    def frame_check(
        self, table: PackTable, tags: bytes
    ) -> Callable[[int, Iterable[Buffer]], bool]:
        """Return a function of a frame's index and stored bytes: whether the frame has a valid tag,
        or needs none."""
        if not self._key:
            return lambda number, stored: True
        # once for all frames of the pack
        table_digest = sha256(table.encode()).digest()

        def has_valid_tag(number: int, stored: Iterable[Buffer]) -> bool:
            start = TAG_BYTES * number
            end = start + TAG_BYTES
            expected = self._frame_tag(table_digest, number, stored)
            return hmac.compare_digest(tags[start:end], expected)

        return has_valid_tag

    def _frame_tag(
        self, table_digest: bytes, number: int, stored: Iterable[Buffer]
    ) -> bytes:
        # the digest binds the frame to its pack, the number to its place in it
        place = _NUMBER.pack(number)
        return self._tag(b"frame", [table_digest, place, *stored])

    def _tag(self, kind: bytes, parts: Iterable[Buffer]) -> bytes:
        """Return the HMAC of ``kind`` and ``parts``. A tag of one kind is never valid for content
        of another kind. Within a kind, all parts except the last have a fixed or encoded length.
        """
        mac = hmac.new(self._key, kind + b"\0", "sha256")
        for part in parts:
            mac.update(part)
        return mac.digest()


def slices(
    buffers: Iterable[Buffer], ranges: Iterable[tuple[int, int]]
) -> Iterator[list[memoryview]]:
    """Yield the bytes of each range (offset, length) in the joined buffers, without a copy. Ranges
    must ascend and be within the buffers.
    """
    remaining = iter(buffers)
    buffer = memoryview(b"")
    begin = 0  # offset of ``buffer`` in the joined buffers
    for offset, length in ranges:
        end = offset + length
        parts: list[memoryview] = []
        while offset < end:
            # skip buffers that end before the range
            while begin + len(buffer) <= offset:
                begin += len(buffer)
                buffer = _as_bytes(next(remaining))
            part = buffer[offset - begin : end - begin]
            parts.append(part)
            offset += len(part)
        yield parts


def _as_bytes(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    # an empty view of several dimensions cannot be cast
    return view.cast("B") if view.nbytes else memoryview(b"")
