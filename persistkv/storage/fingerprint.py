"""Fingerprints of weights: one algorithm over (name, dtype, shape, bytes) of all tensors, without torch.

A checkpoint's tensors are found by its safetensors headers, which are untrusted input, and hashed in bounded pieces.
Weight files of other formats are hashed whole, as one entry each: reading them would run what they say. The result
does not depend on how tensors are spread over files. What was hashed once is remembered, see ``fingerprint_cache``.

Checkpoints and in-memory state dicts have fingerprints in two name spaces that never meet: a framework may rename,
split or cast tensors while it loads.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import xxhash

from persistkv.errors import ConfigurationError
from persistkv.storage.codec import Buffer
from persistkv.storage.fingerprint_cache import FileStamp, TensorEntry, load_entries, save_entries
from persistkv.storage.safetensors_header import read_header

_PIECE_BYTES = 8 << 20  # 8 MiB: past it, larger reads gain nothing and only cost memory
_WHOLE_FILE_SUFFIXES = (".bin", ".pt", ".pth")
_TRAINING_STATE = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")


def fingerprint_checkpoint(directory: str | os.PathLike[str], *, use_cache: bool = True) -> str:
    """The fingerprint of a checkpoint directory: ``checkpoint:`` and 64 hexadecimal digits.

    The weight files are those that Hugging Face's loaders take: ``model.safetensors``, else what
    ``model.safetensors.index.json`` names, else every ``*.safetensors``, else ``*.bin``, ``*.pt`` and ``*.pth``.

    :param use_cache: take over, and remember, what is known of files that have not changed.
    :raises ConfigurationError: where there are no weights, a file does not read as what it claims to be, or one changes
        while it is read.
    """
    entries: list[TensorEntry] = []
    for path in weight_files(Path(directory)):
        entries += _file_entries(path, use_cache)
    return "checkpoint:" + _combine(entries)


def fingerprint_tensors(tensors: Iterable[tuple[str, str, Sequence[int], Buffer]]) -> str:
    """The fingerprint of tensors in memory: ``state-dict:`` and 64 hexadecimal digits.

    :param tensors: (name, dtype, shape, contiguous bytes) each, in any order. The bytes are read before the next item
        is asked for.
    """
    entries = [
        TensorEntry(name, dtype, tuple(shape), xxhash.xxh3_128_hexdigest(data)) for name, dtype, shape, data in tensors
    ]
    return "state-dict:" + _combine(entries)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a checkpoint's weights.

    :raises ConfigurationError: where there are none, or the index does not read as one.
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
    """Reads instead of mapping: a file that is cut meanwhile is an error here, where a mapping would be a signal."""
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
