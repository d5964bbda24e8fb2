import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, AnyStr

import pytest

from persistkv.config import StoreUrl
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_pack
from persistkv_lmdb import LmdbBackend

Opener = Callable[..., LmdbBackend]

IDENTITY = Identity.of({"weights": "abc"})


def stdout_of(process: subprocess.Popen[AnyStr]) -> IO[AnyStr]:
    """Return the pipe from a process that was started with one."""
    assert process.stdout is not None
    return process.stdout


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path at which no store exists yet."""
    return tmp_path / "store"


@pytest.fixture(params=["inline", "extents"])
def placement(request: pytest.FixtureRequest) -> str:
    """Location of new payloads: LMDB values or segment files."""
    return str(request.param)


@pytest.fixture
def identity() -> Identity:
    return IDENTITY


@pytest.fixture
def open_store(path: Path, placement: str) -> Iterator[Opener]:
    """Open the store at ``path`` or ``location``, with the test's placement. Close the open
    backends after the test."""
    opened: list[LmdbBackend] = []

    def open_store(
        options: str = "",
        *,
        location: object = None,
        read_only: bool = False,
    ) -> LmdbBackend:
        options = (
            f"{options}&placement={placement}" if options else f"?placement={placement}"
        )
        url = StoreUrl.parse(f"lmdb://{location or path}{options}")
        opened.append(LmdbBackend.open(url, read_only=read_only))
        return opened[-1]

    yield open_store
    for backend in opened:
        backend.close()


@pytest.fixture
def backend(open_store: Opener) -> LmdbBackend:
    return open_store("?capacity=64MiB")


@pytest.fixture
def namespace(backend: LmdbBackend) -> bytes:
    return backend.open_namespace(IDENTITY).id


@pytest.fixture
def closed_pack(open_store: Opener) -> PackWriter:
    """The only pack of a closed store."""
    backend = open_store()
    pack = sample_pack(backend.open_namespace(IDENTITY).id, 1)
    backend.commit(pack.namespace, CommitBatch([pack]))
    backend.close()
    return pack
