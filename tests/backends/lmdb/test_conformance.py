"""The LMDB driver against the conformance suite and the rules of the catalogue."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.catalogue import LOG_ENTRIES
from persistkv.testing.conformance import BackendConformance, RawKind, RawStore
from persistkv_lmdb import LmdbBackend
from tests import forked
from tests.backends.catalogue_rules import CatalogueRules
from tests.backends.eviction_rules import EvictionRules
from tests.backends.lmdb.consistency import find_faults

RAW_CLIENT = """
import hashlib, os, struct, sys, lmdb

path, action, kind, namespace, name = sys.argv[1:6]
namespace, name = bytes.fromhex(namespace), bytes.fromhex(name)
env = lmdb.open(path, map_size=1 << 30, max_dbs=32)
database = {"payload": b"pieces", "table": b"packs", "manifest": b"manifests", "manifest keys": b"manifest_keys"}[kind]
if kind.startswith("manifest"):
    name = hashlib.blake2b(name, digest_size=16).digest()
extents = env.open_db(b"extents", create=False)
with env.begin() as txn:
    places = [*struct.iter_unpack("<III", txn.get(namespace + name, db=extents) or b"")]
if kind == "payload" and places:
    packs = env.open_db(b"packs", create=False)
    with env.begin() as txn:
        (rest,) = struct.unpack_from("<Q", txn.get(namespace + name, db=packs), 8 + 16)  # bytes of the payload
    data = sys.stdin.buffer.read()
    for segment, page, pages in places:
        fd = os.open(f"{path}/segments/{segment:08d}.seg", os.O_RDWR)
        if action == "get":
            sys.stdout.buffer.write(os.pread(fd, min(rest, 4096 * pages), 4096 * page))
            rest -= min(rest, 4096 * pages)
        else:
            os.pwrite(fd, data[: 4096 * pages], 4096 * page)
            data = data[4096 * pages :]
    sys.exit()
rows = env.open_db(database, create=False)
with env.begin(write=True) as txn:
    held = [(key, value) for key, value in txn.cursor(rows) if key.startswith(namespace + name)]
    if action == "get":
        sys.stdout.buffer.write(b"".join(value for _, value in held))
    data = sys.stdin.buffer.read()
    for key, value in held if action == "put" else []:
        txn.put(key, data[: len(value)], db=rows)
        data = data[len(value) :]
"""


class RawLmdb(RawStore):
    """py-lmdb in a separate process, because one process can open an environment only once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, kind: RawKind, namespace: bytes, name: bytes) -> bytes:
        return self._run("get", kind, namespace, name, b"")

    def put(self, kind: RawKind, namespace: bytes, name: bytes, data: bytes) -> None:
        self._run("put", kind, namespace, name, data)

    def _run(
        self,
        action: str,
        kind: RawKind,
        namespace: bytes,
        name: bytes,
        data: bytes,
    ) -> bytes:
        command = [
            sys.executable,
            "-c",
            RAW_CLIENT,
            str(self.path),
            action,
            kind.value,
            namespace.hex(),
            name.hex(),
        ]
        done = forked.run(command, input=data, stdout=subprocess.PIPE, check=True)
        return bytes(done.stdout)


class LmdbConformance(BackendConformance, CatalogueRules, EvictionRules):
    driver = LmdbBackend
    changes_kept = LOG_ENTRIES
    placement: ClassVar[str]

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"lmdb://{tmp_path}/store?capacity=256MiB&placement={self.placement}"

    @pytest.fixture
    def small_url(self, tmp_path: Path) -> str:
        return f"lmdb://{tmp_path}/small?capacity=4MiB&placement={self.placement}"

    @pytest.fixture
    def ttl_url(self, tmp_path: Path) -> str:
        return (
            f"lmdb://{tmp_path}/aging?capacity=64MiB&ttl=1h&placement={self.placement}"
        )

    def open(self, url: str, *, read_only: bool = False) -> LmdbBackend:
        """Open a store whose ``close`` also checks that it is consistent."""
        backend = LmdbBackend.open(StoreUrl.parse(url), read_only=read_only)
        close = backend.close
        closed: list[bool] = []

        def check_and_close() -> None:
            if not closed:
                closed.append(True)
                assert find_faults(backend) == []
            close()

        backend.close = check_and_close  # type: ignore[method-assign]
        return backend

    @pytest.fixture
    def raw(self, tmp_path: Path) -> RawLmdb:
        return RawLmdb(tmp_path / "store")


class TestInlinePlacement(LmdbConformance):
    placement = "inline"


class TestExtentsPlacement(LmdbConformance):
    placement = "extents"


class TestWithKey(BackendConformance):
    """The conformance suite for a store with a key. The rules of the catalogue know packs by ids
    that follow from their keys, and those of a store with a key are random.
    """

    driver = LmdbBackend

    @pytest.fixture
    def url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
        options = "placement=inline&key_env=PERSISTKV_TEST_KEY"
        return f"lmdb://{tmp_path}/store?capacity=256MiB&{options}"

    @pytest.fixture
    def small_url(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        monkeypatch.setenv("PERSISTKV_TEST_KEY", "k" * 32)
        return f"lmdb://{tmp_path}/small?capacity=4MiB&key_env=PERSISTKV_TEST_KEY"

    @pytest.fixture
    def raw(self, tmp_path: Path) -> RawLmdb:
        return RawLmdb(tmp_path / "store")
