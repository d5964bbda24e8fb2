from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path

import pytest

from persistkv.errors import ConfigurationError
from persistkv.storage.identity import (
    fingerprint_checkpoint,
    fingerprint_tensors,
    weight_files,
)

TENSORS = {
    "b.weight": ("F32", [2, 3], bytes(range(24))),
    "a.bias": ("BF16", [4], b"\x01\x02" * 4),
}


def safetensors(
    tensors: dict[str, tuple[str, list[int], bytes]],
    metadata: bool = False,
) -> bytes:
    header: dict[str, dict[str, object]] = (
        {"__metadata__": {"format": "pt"}} if metadata else {}
    )
    payload = b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": shape,
            "data_offsets": [len(payload), len(payload) + len(data)],
        }
        payload += data
    return with_header(json.dumps(header).encode(), payload)


def with_header(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + payload


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(safetensors(TENSORS))
    return directory


class TestFingerprintCheckpoint:
    def test_same_tensors_in_other_files_give_same_fingerprint(
        self,
        checkpoint: Path,
        tmp_path: Path,
    ) -> None:
        sharded = tmp_path / "sharded"
        sharded.mkdir()
        (sharded / "x-1.safetensors").write_bytes(
            safetensors({"a.bias": TENSORS["a.bias"]}, metadata=True)
        )
        (sharded / "x-2.safetensors").write_bytes(
            safetensors({"b.weight": TENSORS["b.weight"]})
        )
        assert fingerprint_checkpoint(checkpoint) == fingerprint_checkpoint(sharded)

    @pytest.mark.parametrize(
        ("name", "tensor"),
        [
            ("b.weight", ("F32", [2, 3], bytes(23) + b"\x01")),
            ("b.weight", ("F32", [3, 2], bytes(range(24)))),
            ("b.weight", ("I32", [2, 3], bytes(range(24)))),
            ("c.weight", ("F32", [2, 3], bytes(range(24)))),
        ],
    )
    def test_changed_bytes_shape_dtype_or_name_changes_fingerprint(
        self,
        checkpoint: Path,
        name: str,
        tensor: tuple[str, list[int], bytes],
    ) -> None:
        before = fingerprint_checkpoint(checkpoint)
        changed = {"a.bias": TENSORS["a.bias"], name: tensor}
        (checkpoint / "model.safetensors").write_bytes(safetensors(changed))
        assert fingerprint_checkpoint(checkpoint) != before

    def test_same_tensors_as_state_dict_differ_only_in_prefix(
        self,
        checkpoint: Path,
    ) -> None:
        in_memory = fingerprint_tensors(
            (name, dtype, shape, data) for name, (dtype, shape, data) in TENSORS.items()
        )
        on_disk = fingerprint_checkpoint(checkpoint)
        assert in_memory.partition(":")[2] == on_disk.partition(":")[2]
        assert (in_memory.partition(":")[0], on_disk.partition(":")[0]) == (
            "state-dict",
            "checkpoint",
        )

    def test_tensor_longer_than_one_piece_is_hashed_whole(
        self,
        checkpoint: Path,
    ) -> None:
        data = bytearray(os.urandom(17 << 20))
        tensors = {"big": ("U8", [len(data)], bytes(data))}
        (checkpoint / "model.safetensors").write_bytes(safetensors(tensors))
        direct = fingerprint_tensors([("big", "U8", [len(data)], data)])
        assert (
            fingerprint_checkpoint(checkpoint).partition(":")[2]
            == direct.partition(":")[2]
        )

    def test_pytorch_file_is_hashed_whole_and_training_state_ignored(
        self,
        tmp_path: Path,
    ) -> None:
        directory = tmp_path / "old"
        directory.mkdir()
        (directory / "pytorch_model.bin").write_bytes(b"a pickle that nobody opens")
        (directory / "optimizer.pt").write_bytes(b"training state")
        before = fingerprint_checkpoint(directory)
        (directory / "optimizer.pt").write_bytes(b"other training state")
        assert fingerprint_checkpoint(directory) == before
        (directory / "pytorch_model.bin").write_bytes(b"A pickle that nobody opens")
        assert fingerprint_checkpoint(directory) != before


class TestWeightFiles:
    def test_single_file_precedes_index_and_index_precedes_other_files(
        self,
        tmp_path: Path,
    ) -> None:
        for name in ("one.safetensors", "two.safetensors", "stray.safetensors"):
            (tmp_path / name).write_bytes(safetensors(TENSORS))
        index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        assert [path.name for path in weight_files(tmp_path)] == [
            "one.safetensors",
            "two.safetensors",
        ]
        (tmp_path / "model.safetensors").write_bytes(safetensors(TENSORS))
        assert [path.name for path in weight_files(tmp_path)] == ["model.safetensors"]

    @pytest.mark.parametrize(
        "index",
        [
            "{",
            "[]",
            "{}",
            '{"weight_map": {"a": "../x"}}',
            '{"weight_map": {"a": "no"}}',
            '{"weight_map": {"a": 1}}',
        ],
    )
    def test_index_malformed_or_outside_directory_raises(
        self,
        tmp_path: Path,
        index: str,
    ) -> None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
        with pytest.raises(ConfigurationError, match="index"):
            weight_files(tmp_path)

    def test_directory_absent_or_without_weights_raises(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="safetensors"):
            fingerprint_checkpoint(tmp_path)
        with pytest.raises(ConfigurationError, match="directory"):
            fingerprint_checkpoint(tmp_path / "absent")


def entry(
    begin: object,
    end: object,
    shape: object = (2,),
    dtype: object = "F32",
) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


class TestSafetensorsHeader:
    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"\x00" * 7,
            struct.pack("<Q", 1 << 60),
            struct.pack("<Q", 9) + b"{}",
            with_header(b"\xff\xfe"),
            with_header(b"[" * 100_000),
            with_header(b"[]"),
            with_header(b'{"a": 1}'),
            with_header(b'{"a": {}, "a": {}}'),
            with_header(
                json.dumps({"a": entry(0, 8, shape=[-2, -1])}).encode(), bytes(8)
            ),
            with_header(json.dumps({"a": entry(0, 8, shape=[2.5])}).encode(), bytes(8)),
            with_header(json.dumps({"a": entry(8, 0)}).encode(), bytes(8)),
            with_header(json.dumps({"a": entry(-8, 0)}).encode(), bytes(8)),
            with_header(json.dumps({"a": entry(0, 8, dtype=None)}).encode(), bytes(8)),
            with_header(json.dumps({"a": entry(0, 8)}).encode(), bytes(9)),
            with_header(json.dumps({"a": entry(0, 8)}).encode(), bytes(7)),
            with_header(
                json.dumps({"a": entry(0, 8), "b": entry(0, 8)}).encode(), bytes(8)
            ),
            with_header(
                json.dumps({"a": entry(0, 8), "b": entry(12, 20)}).encode(), bytes(20)
            ),
        ],
    )
    def test_malformed_header_raises(self, checkpoint: Path, content: bytes) -> None:
        (checkpoint / "model.safetensors").write_bytes(content)
        with pytest.raises(ConfigurationError, match="checkpoint"):
            fingerprint_checkpoint(checkpoint)

    def test_empty_tensors_and_unknown_dtypes_are_accepted(
        self,
        checkpoint: Path,
    ) -> None:
        tensors = {
            "empty": ("F32", [0, 4], b""),
            "new": ("F128", [1], bytes(16)),
            "scalar": ("I64", [], bytes(8)),
        }
        (checkpoint / "model.safetensors").write_bytes(safetensors(tensors))
        assert fingerprint_checkpoint(checkpoint).startswith("checkpoint:")

    def test_any_flipped_byte_changes_fingerprint_or_raises(
        self,
        checkpoint: Path,
    ) -> None:
        good = safetensors(TENSORS)
        before = fingerprint_checkpoint(checkpoint)
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 0x01
            (checkpoint / "model.safetensors").write_bytes(bad)
            try:
                assert fingerprint_checkpoint(checkpoint) != before, position
            except ConfigurationError:
                continue


class TestFingerprintCache:
    @pytest.fixture(autouse=True)
    def recent_files_are_cached(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = time.time_ns
        monkeypatch.setattr(time, "time_ns", lambda: now() + 10_000_000_000)

    def records(self, cache_home: Path) -> list[Path]:
        return list((cache_home / "persistkv" / "fingerprints").iterdir())

    def test_record_is_used_until_file_changes(
        self,
        checkpoint: Path,
        cache_home: Path,
    ) -> None:
        first = fingerprint_checkpoint(checkpoint)
        (record,) = self.records(cache_home)
        content = json.loads(record.read_bytes())
        content["entries"][0][3] = "0" * 32
        record.write_text(json.dumps(content))
        planted = fingerprint_checkpoint(checkpoint)
        assert planted != first
        (checkpoint / "model.safetensors").touch()
        assert fingerprint_checkpoint(checkpoint) == first

    def test_change_that_keeps_size_and_mtime_is_detected(
        self,
        checkpoint: Path,
    ) -> None:
        path = checkpoint / "model.safetensors"
        os.utime(path, ns=(1, 1))
        first = fingerprint_checkpoint(checkpoint)
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        assert fingerprint_checkpoint(checkpoint) != first

    @pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"{}", b'{"version": 1}'])
    def test_damaged_record_is_ignored(
        self,
        checkpoint: Path,
        cache_home: Path,
        content: bytes,
    ) -> None:
        first = fingerprint_checkpoint(checkpoint)
        (record,) = self.records(cache_home)
        record.write_bytes(content)
        assert fingerprint_checkpoint(checkpoint) == first

    def test_unwritable_cache_directory_is_ignored(
        self,
        checkpoint: Path,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        first = fingerprint_checkpoint(checkpoint)
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        assert fingerprint_checkpoint(checkpoint) == first


def test_fingerprint_cache_recently_modified_file_is_not_recorded(
    checkpoint: Path,
    cache_home: Path,
) -> None:
    fingerprint_checkpoint(checkpoint)
    assert not cache_home.exists()
