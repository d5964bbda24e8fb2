"""Identity: all properties that must match for KV bytes to be valid. A namespace holds the content
of one identity.

An identity contains a fingerprint of the weights: a digest of name, dtype, shape and bytes of all
tensors. The tensors of a checkpoint are located through its safetensors headers, which are
untrusted input; the result does not depend on their distribution over files. Files of other formats
are hashed whole, each like one tensor, because loading them could execute code.

Fingerprints of checkpoints and of in-memory state dicts have different prefixes and are never
equal, because a framework may rename, split or cast tensors while it loads them.

Hashes of weight files are cached under the user's cache directory, one small JSON file per weight
file. An entry is valid only while path, device, inode, size, mtime and ctime are unchanged. If the
cache cannot be read or written, weights are hashed again.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import xxhash

from persistkv.errors import ConfigurationError, FieldDifference
from persistkv.storage.format.codec import Buffer
from persistkv.storage.format.files import replace_file
from persistkv.storage.format.pack import ID_BYTES

IDENTITY_VERSION = 1
MODEL_NAME = "model_name"
"""Field of an identity that need not match."""
# a name with one of these signs is quoted in a dotted path
_PATH_SIGNS = frozenset('.[]"')

_PIECE_BYTES = 8 << 20  # 8 MiB: larger reads are not faster and take more memory
_WHOLE_FILE_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")

_CACHE_VERSION = 1
_CACHE_NAME_DIGITS = 32  # hexadecimal digits of the hash of a weight file's path
# 2 s: a file that changed more recently may change again without a new time stamp
_SETTLED_NS = 2_000_000_000

_MAX_HEADER_BYTES = 100_000_000  # limit of the safetensors format
_LENGTH_BYTES = 8  # size of the length field before a safetensors header
_Natural = Annotated[int, msgspec.Meta(ge=0)]


class Identity(msgspec.Struct, frozen=True, eq=False):
    """Properties of KV bytes, as a tree of JSON values. Two identities are equal if and only if
    their digests are."""

    fields: dict[str, Any]
    """The properties that must match, such as ``{"weights": …, "config": {…}, "dtype": …, "groups":
    […], "block_size": 16}``, and ``model_name``: the model's name or path, which is shown to people
    and need not match."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Identity:
        """Return the identity with a copy of these fields.

        :raises ConfigurationError: the fields are not JSON values.
        """
        try:
            return cls(json.loads(_canonical(fields)))
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                "identity", type(fields).__name__, f"JSON values ({error})"
            ) from None

    def encode(self) -> bytes:
        """Return ``fields`` as canonical JSON: sorted names, no spaces, UTF-8."""
        return _canonical(self.fields)

    @classmethod
    def decode(cls, data: Buffer) -> Identity:
        """Return the identity that ``encode`` has encoded as ``data``.

        :raises ValueError: the bytes are not a JSON object.
        """
        try:
            fields = msgspec.json.decode(data, type=dict[str, Any])
        except RecursionError as error:
            raise ValueError(f"too deeply nested ({error})") from None
        return cls(fields)

    @property
    def digest(self) -> bytes:
        """Digest of ``properties``, 16 bytes: the id of the namespace."""
        head = f"persistkv identity {IDENTITY_VERSION}\n".encode()
        encoded = _canonical(self.properties)
        digest = hashlib.sha256(head + encoded)
        return digest.digest()[:ID_BYTES]

    @property
    def properties(self) -> dict[str, Any]:
        """``fields`` without ``model_name``: the properties that must match."""
        return {
            name: value for name, value in self.fields.items() if name != MODEL_NAME
        }

    @property
    def model_name(self) -> str:
        """Name or path of the model that created the namespace, or else the model's architecture;
        may be empty."""
        name = self.fields.get(MODEL_NAME) or self.fields.get("architecture")
        # another program may have written the field with any type
        return name if isinstance(name, str) else ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def diff(self, other: Identity) -> list[FieldDifference]:
        """Return the properties in which ``other`` (theirs) differs from this identity (ours),
        named by dotted path."""
        ours = dict(_flatten(self.properties))
        theirs = dict(_flatten(other.properties))
        differences = []
        for name in sorted(ours.keys() | theirs.keys()):
            our_value = ours.get(name)
            their_value = theirs.get(name)
            # a field that is absent differs from one that is null
            in_both = name in ours and name in theirs
            # compare values as JSON, in which 1 differs from 1.0 and from true
            is_same = in_both and _canonical(our_value) == _canonical(their_value)
            if not is_same:
                difference = FieldDifference(name, our_value, their_value)
                differences.append(difference)
        return differences

    def nearest(self, others: Sequence[Identity]) -> Identity:
        """Return the one of ``others``, at least one, that differs in the fewest properties."""
        return min(others, key=lambda other: len(self.diff(other)))


def _canonical(fields: Any) -> bytes:
    """Return JSON of which equal fields have equal bytes."""
    return json.dumps(
        fields,
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    ).encode()


def _flatten(
    value: Any,
    path: str = "",
) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a tree with their dotted paths. Empty mappings and lists are leaves."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            item_path = _member_path(path, name)
            yield from _flatten(item, item_path)
    elif isinstance(value, list) and value:
        for index, item in enumerate(value):
            item_path = f"{path}[{index}]"
            yield from _flatten(item, item_path)
    else:
        yield path, value


def _member_path(path: str, name: str) -> str:
    """Return the path of a mapping's member. A name that could be misread is quoted."""
    is_ambiguous = not name or _PATH_SIGNS.intersection(name)
    part = json.dumps(name) if is_ambiguous else name
    return f"{path}.{part}" if path else part


def fingerprint_checkpoint(directory: str | os.PathLike[str]) -> str:
    """Return the fingerprint of the ``weight_files`` of a checkpoint: ``checkpoint:`` and 64
    hexadecimal digits.

    :raises ConfigurationError: there are no weights, a file is malformed or unreadable, or a file
        changes while it is read.
    """
    entries: list[_TensorEntry] = []
    for path in weight_files(Path(directory)):
        entries += _file_entries(path)
    return "checkpoint:" + _combine(entries)


def fingerprint_tensors(
    tensors: Iterable[tuple[str, str, Sequence[int], Buffer]],
) -> str:
    """Return the fingerprint of tensors in memory: ``state-dict:`` and 64 hexadecimal digits.

    :param tensors: (name, dtype, shape, contiguous bytes) of each tensor, in any order. The bytes
        of an item are read before the next item is requested.
    :raises ConfigurationError: there are no tensors.
    """
    entries = []
    for name, dtype, shape, data in tensors:
        digest = xxhash.xxh3_128_hexdigest(data)
        entry = _TensorEntry(name, dtype, tuple(shape), digest)
        entries.append(entry)
    return "state-dict:" + _combine(entries)


def weight_files(directory: Path) -> list[Path]:
    """Return the files with a checkpoint's weights, those that Hugging Face's loaders use:
    ``model.safetensors``, else the files named by ``model.safetensors.index.json``, else every
    ``*.safetensors``, else ``*.bin``, ``*.pt`` and ``*.pth``, except training state such as
    ``optimizer.pt``.

    :raises ConfigurationError: there are no such files, or the index is malformed.
    """
    if not directory.is_dir():
        raise _checkpoint_error(directory, "a directory with a model's weights")
    # the order in which Hugging Face's loaders look for weights; they ignore all other files
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    found = sorted(directory.glob("*.safetensors"))
    if not found:
        found = sorted(filter(_is_weight_file, directory.iterdir()))
    if not found:
        raise _checkpoint_error(
            directory, "a directory with *.safetensors or *.bin files"
        )
    return found


def _is_weight_file(path: Path) -> bool:
    """Return whether a file in another format than safetensors has weights."""
    if path.name.startswith(_TRAINING_STATE):
        return False
    return path.suffix in _WHOLE_FILE_SUFFIXES


def _indexed_files(index: Path) -> list[Path]:
    """Return the files of a checkpoint that its index names.

    :raises ConfigurationError: the index is not valid, or names an absent file.
    """
    expected = (
        'an index with a "weight_map" from tensor names to files of the same directory'
    )
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        names = set(weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _checkpoint_error(index, f"{expected} ({error})") from None
    for name in names:
        # a name with a directory in it could name any file of the machine
        is_name = isinstance(name, str) and Path(name).name == name
        if not is_name or not (index.parent / name).is_file():
            raise _checkpoint_error(index, f"{expected}; {name!r} is none")
    return sorted(index.parent / name for name in names)


def _file_entries(path: Path) -> list[_TensorEntry]:
    """Return name, dtype, shape and hash of each tensor of a file; from an earlier run if it has
    not changed.

    :raises ConfigurationError: it is unreadable, or changes while it is read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            known = _load_entries(path, status)
            if known is not None:
                return known
            entries = _hash_file(path, file.fileno(), status.st_size)
            # if the file changed while it was read, the hashes may be of a mixture
            status_after = os.fstat(file.fileno())
            if _stamp(status_after) != _stamp(status):
                raise _checkpoint_error(
                    path, "a file that does not change while it is read"
                )
    except OSError as error:
        raise _checkpoint_error(path, f"a readable file ({error.strerror})") from None
    _save_entries(path, status, entries)
    return entries


def _hash_file(
    path: Path,
    descriptor: int,
    size: int,
) -> list[_TensorEntry]:
    """Read and hash the tensors of an open weight file of ``size`` bytes."""
    piece_bytes = min(_PIECE_BYTES, max(size, 1))
    buffer = memoryview(bytearray(piece_bytes))
    # hash a file of another format as a whole, like one tensor
    if path.suffix != ".safetensors":
        digest = _hash_span(path, descriptor, 0, size, buffer)
        return [_TensorEntry(path.name, "file", (size,), digest)]
    header_end, tensors = _read_header(path, descriptor, size)
    entries = []
    for name, tensor in tensors.items():
        begin, end = tensor.data_offsets
        start = header_end + begin
        stop = header_end + end
        digest = _hash_span(path, descriptor, start, stop, buffer)
        entry = _TensorEntry(name, tensor.dtype, tensor.shape, digest)
        entries.append(entry)
    return entries


def _hash_span(
    path: Path,
    descriptor: int,
    start: int,
    stop: int,
    buffer: memoryview,
) -> str:
    """Return the xxh3-128 of bytes ``start`` to ``stop`` (exclusive) of an open file, hexadecimal.

    The file is read, not mapped, so that truncation by another process raises ConfigurationError
    instead of SIGBUS.
    """
    digest = xxhash.xxh3_128()
    while start < stop:
        piece = buffer[: stop - start]
        count = os.preadv(descriptor, [piece], start)
        if not count:
            raise _checkpoint_error(path, f"a file of at least {stop} bytes")
        digest.update(piece[:count])
        start += count
    return digest.hexdigest()


def _combine(entries: Sequence[_TensorEntry]) -> str:
    """Return the SHA-256 of tensors, hexadecimal, which does not depend on their order."""
    if not entries:
        raise ConfigurationError("weights", [], "at least one tensor")
    lines = map(json.dumps, entries)
    # sorted, because the files of a checkpoint may contain its tensors in any order
    text = "\n".join(sorted(lines))
    digest = hashlib.sha256(text.encode())
    return digest.hexdigest()


class _TensorEntry(NamedTuple):
    """One tensor; or a weight file of another format, with dtype ``file`` and its size as the
    shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str
    """xxh3-128 of the tensor's bytes, hexadecimal."""


_Stamp = tuple[int, int, int, int, int]
"""File attributes that change if the file is replaced or modified: device, inode, size, mtime and
ctime."""


class _CachedFingerprints(msgspec.Struct, frozen=True):
    """Entries of one weight file, kept so that a later start need not read the whole file."""

    version: int
    path: str
    stamp: _Stamp
    entries: list[_TensorEntry]


def _stamp(status: os.stat_result) -> _Stamp:
    """Return the attributes of a file by which a change is noticed."""
    return (
        status.st_dev,
        status.st_ino,
        status.st_size,
        status.st_mtime_ns,
        status.st_ctime_ns,
    )


def _cache_file(path: Path) -> Path:
    """Return the path of the cache for this weight file; raise RuntimeError without a home
    directory."""
    configured = os.environ.get("XDG_CACHE_HOME")
    root = Path(configured) if configured else Path.home() / ".cache"
    encoded_path = os.fsencode(path.absolute())
    digest = hashlib.sha256(encoded_path).hexdigest()
    name = digest[:_CACHE_NAME_DIGITS]
    directory = root / "persistkv" / "fingerprints"
    return directory / f"{name}.json"


def _load_entries(
    path: Path,
    status: os.stat_result,
) -> list[_TensorEntry] | None:
    """Return the cached entries of a file; None if the file changed, or if the cache has no
    readable record of it."""
    try:
        content = _cache_file(path).read_bytes()
        record = msgspec.json.decode(content, type=_CachedFingerprints)
    except (OSError, RuntimeError, ValueError):
        # RuntimeError means that there is no home directory, or that the JSON is nested too deeply
        return None
    if record.version != _CACHE_VERSION or record.stamp != _stamp(status):
        return None
    # the name of the cache file has only a part of the path's hash, so two paths may share it
    if record.path != str(path.absolute()):
        return None
    return record.entries


def _save_entries(
    path: Path,
    status: os.stat_result,
    entries: list[_TensorEntry],
) -> None:
    """Cache a file's entries, unless the file changed less than 2 s ago or the cache cannot be
    written."""
    # A second change within the clock's resolution would not change the time stamp.
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    age_ns = time.time_ns() - changed_ns
    if age_ns < _SETTLED_NS:
        return
    record = _CachedFingerprints(
        version=_CACHE_VERSION,
        path=str(path.absolute()),
        stamp=_stamp(status),
        entries=entries,
    )
    content = msgspec.json.encode(record)
    # without the cache, the next start only takes longer
    with suppress(OSError, RuntimeError):
        replace_file(_cache_file(path), [content])


class _Tensor(msgspec.Struct, frozen=True):
    """Entry of a safetensors header."""

    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]
    """Offsets of the first byte and of the byte after the last one, counted from the end of the
    header."""


def _read_header(
    path: Path,
    descriptor: int,
    size: int,
) -> tuple[int, dict[str, _Tensor]]:
    """Return the byte offset of the end of a file's header, and the tensors by name, in the order
    of their bytes, which cover the rest of the file without gaps; raise ConfigurationError if it is
    not a valid safetensors file.
    """
    length_field = os.pread(descriptor, _LENGTH_BYTES, 0)
    length = int.from_bytes(length_field, "little")
    max_length = min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES)
    # the length is checked before so many bytes are read
    if size < _LENGTH_BYTES or length > max_length:
        raise _invalid(path, f"its header cannot have {length} of {size} bytes")
    encoded = os.pread(descriptor, length, _LENGTH_BYTES)
    unordered = _decode_header(path, encoded)
    # in the order of their bytes, each must begin where the one before it ends
    names = sorted(unordered, key=lambda name: unordered[name].data_offsets)
    tensors = {name: unordered[name] for name in names}
    end = 0
    for name, tensor in tensors.items():
        begin, stop = tensor.data_offsets
        if begin != end:
            raise _invalid(
                path, f"tensor {name!r} begins at byte {begin} instead of {end}"
            )
        end = stop
    header_end = _LENGTH_BYTES + length
    file_end = header_end + end
    if file_end != size:
        raise _invalid(path, f"its tensors end at byte {file_end} of {size}")
    return header_end, tensors


def _decode_header(path: Path, encoded: bytes) -> dict[str, _Tensor]:
    """Return the tensors in a file's header by name; raise ConfigurationError if it does not
    decode."""
    tensors = {}
    try:
        # decode the entries after the header, because one of them is no tensor
        header = msgspec.json.decode(encoded, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            tensors[name] = msgspec.json.decode(entry, type=_Tensor)
    except (ValueError, RecursionError) as error:
        raise _invalid(path, f"its header does not read: {error}") from None
    return tensors


def _invalid(path: Path, problem: str) -> ConfigurationError:
    return _checkpoint_error(path, f"a valid safetensors file; {problem}")


def _checkpoint_error(path: Path, expected: str) -> ConfigurationError:
    """Return the error for a path of a checkpoint that is something else.

    :param expected: a description of a valid one.
    """
    return ConfigurationError("checkpoint", str(path), expected)
