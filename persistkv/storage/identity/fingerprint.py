"""Fingerprints of weights: one algorithm over (name, dtype, shape, bytes) of all tensors, without torch.

The tensors of a checkpoint are located through its safetensors headers, which are untrusted input, and hashed in pieces
of bounded size. Weight files of other formats are hashed whole, as one entry each, because loading them could execute
code. For safetensors, the result does not depend on the distribution of tensors over files. Results are cached, see
``fingerprint_cache``.

Fingerprints of checkpoints and of in-memory state dicts have different prefixes and are never equal: a framework may
rename, split or cast tensors while it loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from persistkv.errors import ConfigurationError
from persistkv.storage.format.codec import Buffer
from persistkv.storage.identity.fingerprint_cache import FileStamp, TensorEntry, load_entries, save_entries
from persistkv.storage.identity.safetensors_header import read_header

_PIECE_BYTES = 8 << 20  # 8 MiB: larger reads are not faster and take more memory
_WHOLE_FILE_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def fingerprint_checkpoint(directory: str | os.PathLike[str], *, use_cache: bool = True) -> str:
    """Return the fingerprint of a checkpoint directory: ``checkpoint:`` and 64 hexadecimal digits.

    The weight files are those that Hugging Face's loaders use: ``model.safetensors``, else the files named by
    ``model.safetensors.index.json``, else every ``*.safetensors``, else ``*.bin``, ``*.pt`` and ``*.pth``.

    :param use_cache: use cached hashes of files that have not changed, and cache new ones.
    :raises ConfigurationError: there are no weights, a file is malformed or unreadable, or a file changes while it is
        read.
    """
    entries: list[TensorEntry] = []
    for path in weight_files(Path(directory)):
        entries += _file_entries(path, use_cache)
    return "checkpoint:" + _combine(entries)


def fingerprint_tensors(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """Return the fingerprint of tensors in memory: ``state-dict:`` and 64 hexadecimal digits.

    :param tensors: (name, dtype, shape, contiguous bytes) of each tensor, in any order. The bytes of an item are read
        before the next item is requested.
    :raises ConfigurationError: there are no tensors.
    """
    entries = [
        TensorEntry(name, dtype, tuple(shape), xxhash.xxh3_128_hexdigest(data)) for name, dtype, shape, data in tensors
    ]
    return "state-dict:" + _combine(entries)


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights.

    :raises ConfigurationError: there are none, or the index is malformed.
    """
    if not directory.is_dir():
        raise ConfigurationError("checkpoint", str(directory), "a directory with a model's weights")
    single, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if index.is_file():
        return _indexed_files(index)
    if found := sorted(directory.glob("*.safetensors")):
        return found
    found = sorted(
        path
        for path in directory.iterdir()
        if path.suffix in _WHOLE_FILE_SUFFIXES and not path.name.startswith(_TRAINING_STATE)
    )
    if not found:
        raise ConfigurationError("checkpoint", str(directory), "a directory with *.safetensors or *.bin files")
    return found


def _indexed_files(index: Path) -> list[Path]:
    expected = 'an index with a "weight_map" from tensor names to files beside it'
    try:
        names = set(json.loads(index.read_bytes())["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError("checkpoint", str(index), f"{expected} ({error})") from None
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (index.parent / name).is_file():
            raise ConfigurationError("checkpoint", str(index), f"{expected}; {name!r} is none")
    return sorted(index.parent / name for name in names)


def _file_entries(path: Path, use_cache: bool) -> list[TensorEntry]:
    try:
        with path.open("rb", buffering=0) as file:
            stamp = FileStamp.of(file.fileno())
            if use_cache and (known := load_entries(path, stamp)) is not None:
                return known
            entries = _hash_file(path, file.fileno(), stamp.size)
            if FileStamp.of(file.fileno()) != stamp:
                raise ConfigurationError("checkpoint", str(path), "a file that does not change while it is read")
    except OSError as error:
        raise ConfigurationError("checkpoint", str(path), f"a readable file ({error.strerror})") from None
    if use_cache:
        save_entries(path, stamp, entries)
    return entries


def _hash_file(path: Path, descriptor: int, size: int) -> list[TensorEntry]:
    buffer = memoryview(bytearray(min(_PIECE_BYTES, max(size, 1))))
    if path.suffix != ".safetensors":
        return [TensorEntry(path.name, "file", (size,), _hash_span(path, descriptor, 0, size, buffer))]
    return [
        TensorEntry(
            tensor.name, tensor.dtype, tensor.shape, _hash_span(path, descriptor, tensor.start, tensor.stop, buffer)
        )
        for tensor in read_header(path, descriptor, size)
    ]


def _hash_span(path: Path, descriptor: int, start: int, stop: int, buffer: memoryview) -> str:
    """Hash bytes ``start`` to ``stop`` of a file.

    The file is read, not mapped, so that truncation by another process raises an error here instead of SIGBUS.

    :raises ConfigurationError: the file is shorter than ``stop`` bytes.
    """
    digest = xxhash.xxh3_128()
    while start < stop:
        count = os.preadv(descriptor, [buffer[: stop - start]], start)
        if not count:
            raise ConfigurationError("checkpoint", str(path), f"a file of at least {stop} bytes")
        digest.update(buffer[:count])
        start += count
    return digest.hexdigest()


def _combine(entries: Sequence[TensorEntry]) -> str:
    if not entries:
        raise ConfigurationError("weights", [], "at least one tensor")
    lines = sorted(json.dumps([entry.name, entry.dtype, list(entry.shape), entry.digest]) for entry in entries)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()
