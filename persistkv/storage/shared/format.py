"""Objects of a shared store's index, and the names of all blobs. docs/shared.md specifies both.

**The index is a set.** A *delta* lists packs that were added, used and removed. The content of a
namespace is the union of the deltas of all its index objects, in any order, each applied any number
of times: names of packs are unique, times merge by maximum, requests by their newest version. An
object that *includes* others contains all their content.

An index object is a sealed record (``format.seal``) of a magic number, the number of the format and
the body, under the name of its namespace and its own. An object of a newer format is never included
in another one, and never deleted.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from random import Random
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from persistkv.errors import CorruptPackError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.keys import KEY_ID_BYTES
from persistkv.storage.format.pack import ID_BYTES, PLAIN_KEY
from persistkv.storage.format.seal import Seal
from persistkv.tenants import TAG_BYTES

FORMAT_VERSION = 1
NONCE_BYTES = 16  # random bytes in each name: 128 bits
# bytes of the name of a pack's blob: pack id and nonce
NAME_BYTES = ID_BYTES + NONCE_BYTES
# 32 MiB: readers skip larger index objects, so writers write none
MAX_OBJECT_BYTES = 32 << 20
# 256 KiB: maximum size of identities, policy, notes, statuses and ``latest``
MAX_SMALL_BYTES = 256 << 10
MAX_VERSION = 1 << 62
LATEST_TIME = float(1 << 40)  # seconds since the epoch: a time that no clock reaches
# least level of a base (``Names.level``); segments have smaller ones
BASE_LEVEL = 1 << 16
# largest number with the 12 hexadecimal digits that names have
_MAX_MILLISECONDS = (1 << 48) - 1

_HEADER = struct.Struct("<8sI")  # magic number, ``FORMAT_VERSION``
_MAGIC = b"PKVINDEX"
# in the names of a store without a key, in place of the id of a keyring
PLAIN_NAME = "plain"
_HEX = re.compile(r"([0-9a-f]{32})")
_KEY = re.compile(r"([0-9a-f]{16})")
_PACK = re.compile(r"([0-9a-f]{32})-([0-9a-f]{32})")
# matches level, milliseconds since the epoch, nonce
_INDEX = re.compile(r"([0-9a-f]{8})-[0-9a-f]{12}-[0-9a-f]{32}")

# types of fields with ranges: a value out of range makes the object unreadable
_Id = Annotated[bytes, Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
Digest = Annotated[bytes, Meta(min_length=TAG_BYTES, max_length=TAG_BYTES)]
_Nonce = Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Name = Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
DataKeyId = Annotated[bytes, Meta(min_length=KEY_ID_BYTES, max_length=KEY_ID_BYTES)]
_Version = Annotated[int, Meta(ge=1, le=MAX_VERSION)]
Time = Annotated[float, Meta(ge=0, le=LATEST_TIME)]
_Offset = Annotated[int, Meta(ge=0, le=MAX_VERSION)]
_Length = Annotated[int, Meta(ge=0, le=MAX_OBJECT_BYTES)]


class NewerFormatError(CorruptPackError):
    """The object was written by a newer release, in a format that this release does not read."""

    def __init__(self, version: int) -> None:
        super().__init__(
            "format", f"version {version}; this release reads {FORMAT_VERSION}"
        )


Content = TypeVar("Content")


class ArrayStruct(
    msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True
):
    """Content of a blob, or a part of it: an array of its fields. One with more fields does not
    decode."""


class PackEntry(ArrayStruct, frozen=True):
    """A pack that was added."""

    pack_id: _Id
    nonce: _Nonce
    """Drawn when the pack was uploaded. Pack id and nonce are the name of its blob, which is never
    used again."""
    body: bytes
    """The encoded ``PackTable``."""
    time: Time
    """Time of its last use, on the medium's clock: seconds since the epoch."""

    @property
    def name(self) -> bytes:
        return self.pack_id + self.nonce


class ManifestEntry(ArrayStruct, frozen=True):
    """A request that was written. The newest version of a request counts."""

    digest: _Id
    """Digest of the request's id, 16 bytes."""
    version: _Version
    """Greater than all versions of the request that its writer knew."""
    time: Time
    """Time of the write, on the medium's clock."""
    head: bytes
    """The encoded ``RequestManifest``."""
    packs: bytes
    """Concatenated ids of the packs that hold the request, from the beginning of the context on."""
    keys: _Nonce
    """Random part of the name of the blob with the request's keys."""
    offset: _Offset
    length: _Length
    """Place of the keys, a sealed record, in that blob."""
    data_key: DataKeyId = PLAIN_KEY
    """Id of the data key of the request's tenant; ``PLAIN_KEY`` without a key."""


class Dropped(ArrayStruct, frozen=True):
    """A request that was deleted: all its versions up to this one."""

    digest: _Id
    """Digest of the request's id."""
    version: _Version
    """Newest version that the deletion covers."""
    time: Time
    """Time of the deletion, on the medium's clock."""


class Pin(ArrayStruct, frozen=True):
    """A request that was pinned or unpinned. Versions are those of the request's manifest."""

    digest: _Id
    """Digest of the request's id."""
    version: _Version
    pinned: bool
    """Whether the request was pinned; False: it was unpinned."""


class UseEntry(ArrayStruct, frozen=True):
    """Packs that were used at one time."""

    time: Time
    """Time on the medium's clock."""
    packs: bytes
    """Concatenated pack ids."""


class Tombstone(ArrayStruct, frozen=True):
    """End of a pack for good: its name is never used again."""

    name: _Name
    """Pack id and nonce: the name of one blob of the pack."""
    time: Time
    """Time of the removal, on the medium's clock."""


class Delta(ArrayStruct, frozen=True):
    """Content of every index object. A new field needs a new ``FORMAT_VERSION``."""

    packs: Sequence[PackEntry] = ()
    uses: Sequence[UseEntry] = ()
    removed: Sequence[Tombstone] = ()
    manifests: Sequence[ManifestEntry] = ()
    dropped: Sequence[Dropped] = ()
    pins: Sequence[Pin] = ()
    includes: Sequence[str] = ()
    """Names of index objects whose whole content this one contains, together with ``parts``."""
    parts: Sequence[str] = ()
    """Names of index objects that belong to the same base. Each is an object of its own. Readers
    must read it, unless they have read everything in ``includes``."""
    sealed: Sequence[bytes] = ()
    """Records with packs and manifests that the data keys of their tenants seal (``IndexObjects``),
    in a store with a key. The object has no other ``packs`` and ``manifests``."""

    @property
    def is_empty(self) -> bool:
        """Whether it changes nothing."""
        content = (
            self.packs,
            self.uses,
            self.removed,
            self.manifests,
            self.dropped,
            self.pins,
        )
        return not any(content)

    def clamped(self, latest: float) -> Delta:
        """Return the delta without times after ``latest``, the time of the object that carries it.
        Otherwise, packs of a writer whose clock is fast would be evicted last.
        """
        return msgspec.structs.replace(
            self,
            packs=_clamped(self.packs, latest),
            uses=_clamped(self.uses, latest),
            removed=_clamped(self.removed, latest),
            manifests=_clamped(self.manifests, latest),
            dropped=_clamped(self.dropped, latest),
        )


Timed = TypeVar("Timed", PackEntry, UseEntry, Tombstone, ManifestEntry, Dropped)


def _clamped(entries: Iterable[Timed], latest: float) -> list[Timed]:
    """Return entries in which ``latest`` replaces later times."""
    found: list[Timed] = []
    for entry in entries:
        time = min(entry.time, latest)
        found.append(msgspec.structs.replace(entry, time=time))
    return found


class TenantContent(ArrayStruct, frozen=True):
    """Content of an object of the index that one data key seals."""

    packs: Sequence[PackEntry] = ()
    manifests: Sequence[ManifestEntry] = ()


class Latest(ArrayStruct, frozen=True):
    """Content of ``latest``. Each merge overwrites it. It affects how soon readers find new
    objects, and which engine merges, but no content depends on it."""

    writer: bytes
    """Random name of the handle that has merged last."""
    time: Time
    """Time of that merge, on the medium's clock."""
    recent: Sequence[tuple[str, _Length]]
    """Names and sizes in bytes of index objects that were written recently, newest last."""


def union(
    deltas: Iterable[Delta],
    includes: Sequence[str] = (),
) -> Delta:
    """Return a delta that contains the content of several, and includes the objects with these
    names. The lists are only joined: an entry may occur twice, and replicas apply it once."""
    packs: list[PackEntry] = []
    uses: list[UseEntry] = []
    removed: list[Tombstone] = []
    manifests: list[ManifestEntry] = []
    dropped: list[Dropped] = []
    pins: list[Pin] = []
    for delta in deltas:
        packs += delta.packs
        uses += delta.uses
        removed += delta.removed
        manifests += delta.manifests
        dropped += delta.dropped
        pins += delta.pins
    return Delta(packs, uses, removed, manifests, dropped, pins, includes)


def seal_object(
    name: str,
    body: bytes,
    seal: Seal,
    namespace: bytes,
) -> bytes:
    """Return the bytes of the object ``name``."""
    header = _HEADER.pack(_MAGIC, FORMAT_VERSION)
    full_name = record_name(namespace, name)
    return seal.sealed(full_name, header + body)


def open_object(
    name: str,
    data: Buffer,
    seal: Seal,
    namespace: bytes,
) -> bytes:
    """Return the body of the object ``name``.

    :raises CorruptPackError: it is damaged, belongs under another name, or was not written with the
        key.
    :raises NewerFormatError: it was written by a newer release.
    """
    full_name = record_name(namespace, name)
    content = seal.opened(full_name, data)
    if len(content) < _HEADER.size:
        raise CorruptPackError("index object", f"{len(content)} bytes")
    magic, version = _HEADER.unpack_from(content)
    if magic != _MAGIC:
        raise CorruptPackError("index object", "it is something else")
    if version > FORMAT_VERSION:
        raise NewerFormatError(version)
    return content[_HEADER.size :]


def record_name(namespace: bytes, name: str) -> bytes:
    """Return the name under which a record of a shared store is sealed.

    :param namespace: its id; ``NO_NAMESPACE`` for records of the whole store.
    """
    return namespace + name.encode()


def encode(content: ArrayStruct | Sequence[ArrayStruct]) -> bytes:
    """Return the body of an object or record with this content."""
    return _ENCODER.encode(content)


def decode(
    decoder: msgspec.msgpack.Decoder[Content],
    body: bytes,
    what: str,
) -> Content:
    """Decode the body of an object or record.

    :param what: names the content in an error.
    :raises CorruptPackError: it is malformed, or a length, version or time is out of range.
    """
    try:
        return decoder.decode(body)
    # RecursionError arises from junk that is nested deeply
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptPackError(what, str(error)) from None


def decode_delta(body: bytes) -> Delta:
    """Decode the body of an index object; errors as in ``decode``."""
    delta = decode(_DELTAS, body, "index object")
    _check_ids(delta.uses, delta.manifests)
    return delta


def decode_content(body: bytes) -> TenantContent:
    """Decode the body of a record in ``Delta.sealed``; errors as in ``decode``."""
    content = decode(_CONTENTS, body, "index object")
    _check_ids((), content.manifests)
    return content


def decode_latest(body: bytes) -> Latest:
    """Decode the body of ``latest``; errors as in ``decode``."""
    return decode(_LATEST, body, "latest")


def split_ids(joined: bytes) -> list[bytes]:
    """Return the pack ids in their concatenation."""
    starts = range(0, len(joined), ID_BYTES)
    return [joined[start : start + ID_BYTES] for start in starts]


def _check_ids(uses: Iterable[UseEntry], manifests: Iterable[ManifestEntry]) -> None:
    """Raise a CorruptPackError if a field is no concatenation of pack ids."""
    joined = [use.packs for use in uses]
    joined += [manifest.packs for manifest in manifests]
    for ids in joined:
        if len(ids) % ID_BYTES:
            raise CorruptPackError("pack ids", f"{len(ids)} bytes")


_ENCODER = msgspec.msgpack.Encoder()
_DELTAS = msgspec.msgpack.Decoder(Delta)
_CONTENTS = msgspec.msgpack.Decoder(TenantContent)
_LATEST = msgspec.msgpack.Decoder(Latest)


def _parse_bytes(
    pattern: re.Pattern[str],
    prefix: str,
    blob: str,
) -> bytes | None:
    """Return the bytes whose hexadecimal digits follow ``prefix`` in the name of a blob; None: the
    name has another form."""
    if not blob.startswith(prefix):
        return None
    found = pattern.fullmatch(blob, len(prefix))
    if found is None:
        return None
    # the pattern of a pack has two groups, pack id and nonce; other patterns have one
    hex_parts = found.groups()
    return bytes.fromhex("".join(hex_parts))


# cache the results, because ``latest`` names the same objects many times
@lru_cache(maxsize=4096)
def _level(name: str) -> int:
    """Return the level of an index object (``Names.level``), which its name contains. 0 for a
    commit, and for any other name.

    :param name: without the prefix ``index/``.
    """
    found = _INDEX.fullmatch(name)
    return 0 if found is None else int(found[1], 16)


class Names:
    """Names of the blobs of one namespace's index. One index exists per namespace and keyring.

    :param keyring_id: ``StoreKeys.keyring_id``.
    """

    def __init__(self, namespace: bytes, keyring_id: str = PLAIN_NAME) -> None:
        self.base = f"{namespace.hex()}-{keyring_id}/"
        """Prefix of all names."""
        self.inbox = f"{self.base}inbox/"
        """Prefix of commits."""
        self.index = f"{self.base}index/"
        """Prefix of segments and of parts of bases."""
        self.packs = f"{self.base}packs/"
        """Prefix of packs."""
        self.keys = f"{self.base}keys/"
        """Prefix of blobs with the keys of requests."""
        self.latest = f"{self.base}latest"
        """Name of the blob with ``Latest``."""
        self.swept = f"{self.base}swept"
        """Name of the blob that records when the last sweep began."""

    def pack(self, name: bytes) -> str:
        """Return the name of the blob of a pack, whose pack id and nonce are ``name``."""
        pack_id = name[:ID_BYTES].hex()
        nonce = name[ID_BYTES:].hex()
        return f"{self.packs}{pack_id}-{nonce}"

    def pack_name(self, blob: str) -> bytes | None:
        """Return pack id and nonce in the name of a pack's blob; None: the name has another
        form."""
        return _parse_bytes(_PACK, self.packs, blob)

    def keys_blob(self, nonce: bytes) -> str:
        return f"{self.keys}{nonce.hex()}"

    def keys_nonce(self, blob: str) -> bytes | None:
        """Return the nonce in the name of a blob with the keys of requests; None: the name has
        another form."""
        return _parse_bytes(_HEX, self.keys, blob)

    def new_commit(self, random: Random) -> str:
        """Return a name for a commit in the inbox. It is only random, because commits have no
        order."""
        nonce = random.randbytes(NONCE_BYTES)
        return f"{self.inbox}{nonce.hex()}"

    def new_index(
        self,
        level: int,
        time: float,
        random: Random,
    ) -> str:
        """Return a name for a segment or a part of a base. Names sort by level, then by time: an
        object has a greater name than the objects that it includes, and readers begin with the
        greatest.

        :param time: present time on the medium's clock.
        """
        # a wrong clock must not change the length of the name
        milliseconds = max(0, int(1000 * time))
        milliseconds = min(milliseconds, _MAX_MILLISECONDS)
        nonce = random.randbytes(NONCE_BYTES)
        return f"{self.index}{level:08x}-{milliseconds:012x}-{nonce.hex()}"

    def level(self, blob: str) -> int:
        """Return the level of an object in ``index/``; 0: the name is that of a commit, or has
        another form.

        It is 1 for a segment that includes only commits; more than the level of every object that
        it includes; ``BASE_LEVEL`` or more for a base.
        """
        return _level(blob.removeprefix(self.index))

    def is_commit(self, blob: str) -> bool:
        return _parse_bytes(_HEX, self.inbox, blob) is not None

    def is_object(self, blob: str) -> bool:
        """Return whether a name is that of a commit or of an object in ``index/``."""
        if blob.startswith(self.index):
            return self.level(blob) > 0
        return self.is_commit(blob)


class StoreNames:
    """Names of the blobs that belong to no namespace's index. Stores with different keys share a
    medium, but nothing else: the blobs of one are junk to the others.

    :param keyring_id: ``StoreKeys.keyring_id``.
    """

    def __init__(self, keyring_id: str = PLAIN_NAME) -> None:
        base = keyring_id
        self.policy = f"{base}/policy"
        """Name of the recorded policy, which marks the store."""
        self.identities = f"{base}/identities/"
        """Prefix of the identities of namespaces."""
        self.totals = f"{base}/totals/"
        """Prefix of the totals of namespaces."""
        self.tenants = f"{base}/tenants/"
        """Prefix of the data keys of tenants."""
        self.forgotten = f"{base}/forgotten/"
        """Prefix of the records of forgotten tenants."""
        self.statuses = f"{base}/status/"
        """Prefix of the statuses of engines."""
        self._notes = f"{base}/notes/"
        """Prefix of the notes about namespaces."""

    def identity(self, namespace: bytes) -> str:
        return f"{self.identities}{namespace.hex()}"

    def parse_identity(self, blob: str) -> bytes | None:
        """Return the namespace id in the name of an identity; None: the name has another form."""
        return _parse_bytes(_HEX, self.identities, blob)

    def totals_of(self, namespace: bytes) -> str:
        return f"{self.totals}{namespace.hex()}"

    def parse_totals(self, blob: str) -> bytes | None:
        """Return the namespace id in the name of totals; None: the name has another form."""
        return _parse_bytes(_HEX, self.totals, blob)

    def tenant(self, key_id: bytes) -> str:
        """Return the name of the data key of a tenant."""
        return f"{self.tenants}{key_id.hex()}"

    def parse_tenant(self, blob: str) -> bytes | None:
        """Return the id of the data key in the name of its blob; None: the name has another
        form."""
        return _parse_bytes(_KEY, self.tenants, blob)

    def new_record(self, random: Random) -> str:
        """Return a name for a record of forgotten tenants."""
        nonce = random.randbytes(NONCE_BYTES)
        return f"{self.forgotten}{nonce.hex()}"

    def note(self, namespace: bytes, name: str) -> str:
        return f"{self._notes}{namespace.hex()}/{name.lower()}"


# id in place of that of a namespace in ``record_name``, for blobs of the whole store
NO_NAMESPACE = bytes(ID_BYTES)
