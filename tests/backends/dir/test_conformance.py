"""The medium in a directory against the conformance suite of media: on a local disk, and on mounts
of a shared one.

``PERSISTKV_SHARED_MOUNTS`` names two mounts of one file system, ``/mnt/one:/mnt/two``, as two
machines would have them (``tests/servers/test-cephfs.sh``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest

from persistkv.storage.blobs import Blobs
from persistkv.testing import BlobsConformance
from persistkv.testing.conformance.blobs import RawBlobs
from persistkv_dir import DirBlobs

MOUNTS = [
    Path(path)
    for path in os.environ.get("PERSISTKV_SHARED_MOUNTS", "").split(":")
    if path
]


class RawDirectory(RawBlobs):
    """Files of a directory."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def get(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def put(self, name: str, data: bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def names(self) -> Sequence[str]:
        files = [path for path in self.root.rglob("*") if path.is_file()]
        return [path.relative_to(self.root).as_posix() for path in files]


class TestDirBlobs(BlobsConformance):
    @pytest.fixture
    def opener(self, tmp_path: Path) -> Callable[[], Blobs]:
        return partial(DirBlobs, tmp_path / "mounted" / "store")

    @pytest.fixture
    def raw(self, tmp_path: Path) -> RawDirectory:
        return RawDirectory(tmp_path / "mounted" / "store")


class Alternating:
    """Opens handles on several mounts of one directory in turn, as several machines do."""

    def __init__(self, roots: Sequence[Path]) -> None:
        self.roots = roots
        self.opened = 0

    def __call__(self) -> Blobs:
        root = self.roots[self.opened % len(self.roots)]
        self.opened += 1
        return DirBlobs(root)


class TestDirBlobsOnTwoMounts(BlobsConformance):
    """The handle of a test is on the first mount, another one and the raw files are on the
    second."""

    __test__ = len(MOUNTS) == 2

    @pytest.fixture
    def roots(self) -> list[Path]:
        name = secrets.token_hex(8)
        return [mount / name / "store" for mount in MOUNTS]

    @pytest.fixture
    def opener(self, roots: list[Path]) -> Callable[[], Blobs]:
        return Alternating(roots)

    @pytest.fixture
    def raw(self, roots: list[Path]) -> RawDirectory:
        return RawDirectory(roots[1])
