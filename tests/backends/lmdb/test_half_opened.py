"""A failure to open after LMDB has opened its environment leaves nothing open, even while the error
is referenced."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from persistkv.errors import StoreBusyError, StoreError, StoreUnavailableError
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.pack_writer import PackWriter
from persistkv.storage.identity import Identity
from persistkv.testing.conformance.suite import read_pack, tables
from persistkv.testing.samples import payload_of, sample_pack
from persistkv_lmdb import LmdbBackend
from tests.backends.lmdb.conftest import Opener

Failing = Callable[[Path, pytest.MonkeyPatch], AbstractContextManager[None]]
Failure = tuple[Failing, type[StoreError]]


def failing_write(name: str, number: int) -> Failing:
    """Make write number ``number`` to the file ``name`` fail with EIO."""

    @contextmanager
    def failing(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        pwrite, seen = os.pwrite, []
        before = (path / name).read_bytes() if (path / name).exists() else b""

        def counting(fd: int, data: bytes, offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{fd}") == str(path / name):
                seen.append(data)
                if len(seen) == number:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            return pwrite(fd, data, offset)

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", counting)
            yield
        assert len(seen) >= number
        # later writes only restore the previous content
        assert all(data == before for data in seen[number:])

    return failing


@contextmanager
def failing_write_to_empty_guard(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Empty the guard, so that opening writes it after LMDB's environment is open, and make this
    write fail."""
    (path / "guard").write_bytes(b"")
    with failing_write("guard", 1)(path, monkeypatch):
        yield


@pytest.fixture
def placement() -> str:
    """The one placement of the tests: attempts fail before a payload is read or written."""
    return "extents"


@contextmanager
def guard_locked_by_closing_process(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Hold a lock on the guard, as a process that closes the store does, so that opening waits for
    it."""
    path.mkdir(exist_ok=True)
    with (path / "guard").open("a+") as other, monkeypatch.context() as patch:
        fcntl.flock(other, fcntl.LOCK_EX)
        patch.setattr("persistkv_lmdb.opening.CLOSING_PATIENCE_S", 0.05)
        yield


FAILURES: dict[str, Failure] = {
    # the write that records the store as open
    "guard write": (failing_write("guard", 1), StoreUnavailableError),
    "lock mark write": (failing_write("writer.lock", 1), StoreError),
    "closing process": (guard_locked_by_closing_process, StoreBusyError),
}
FAILURES_OF_EXISTING_STORE = FAILURES | {
    "empty guard write": (failing_write_to_empty_guard, StoreUnavailableError)
}


def open_descriptors(path: Path) -> list[tuple[str, int]]:
    """Return names and access modes of this process's descriptors of files in the store, with
    repetitions."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            link = Path(os.readlink(entry))
        except FileNotFoundError:  # the descriptor of the directory listing itself
            continue
        if link.is_relative_to(path):
            found.append(
                (link.name, fcntl.fcntl(int(entry.name), fcntl.F_GETFL) & os.O_ACCMODE)
            )
    return sorted(found)


def fail_to_open(
    open_store: Opener,
    failure: Failure,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> pytest.ExceptionInfo[StoreError]:
    failing, kind = failure
    with failing(path, monkeypatch), pytest.raises(kind) as caught:
        open_store()
    return caught


def open_after_failure(
    open_store: Opener,
    failure: Failure,
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> LmdbBackend:
    """Open the store while the error of a failed attempt is still referenced."""
    caught = fail_to_open(open_store, failure, path, monkeypatch)
    assert not open_descriptors(path)
    backend = open_store()
    assert caught.value.__traceback__ is not None
    return backend


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_open_new_store_after_failed_open_succeeds(
    open_store: Opener,
    path: Path,
    identity: Identity,
    monkeypatch: pytest.MonkeyPatch,
    failure: Failure,
) -> None:
    backend = open_after_failure(open_store, failure, path, monkeypatch)
    namespace = backend.open_namespace(identity).id
    backend.commit(namespace, CommitBatch([sample_pack(namespace, 1)]))
    assert len(tables(backend, namespace)) == 1


@pytest.mark.parametrize(
    "failure", FAILURES_OF_EXISTING_STORE.values(), ids=FAILURES_OF_EXISTING_STORE
)
def test_open_existing_store_after_failed_open_succeeds(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
    monkeypatch: pytest.MonkeyPatch,
    failure: Failure,
) -> None:
    backend = open_after_failure(open_store, failure, path, monkeypatch)
    backend.commit(
        closed_pack.namespace, CommitBatch([sample_pack(closed_pack.namespace, 2)])
    )
    assert read_pack(backend, closed_pack.namespace, closed_pack.table) == payload_of(
        closed_pack
    )


@pytest.mark.parametrize(
    "failure", FAILURES_OF_EXISTING_STORE.values(), ids=FAILURES_OF_EXISTING_STORE
)
def test_open_for_writing_with_open_reader_after_failed_open_succeeds(
    open_store: Opener,
    path: Path,
    closed_pack: PackWriter,
    monkeypatch: pytest.MonkeyPatch,
    failure: Failure,
) -> None:
    """The reader opens its environment again, which the writer has closed."""
    with closing(open_store(read_only=True)) as reader:
        read_pack(reader, closed_pack.namespace, closed_pack.table)
        before = open_descriptors(path)
        caught = fail_to_open(open_store, failure, path, monkeypatch)
        assert not open_descriptors(path)
        assert read_pack(
            reader, closed_pack.namespace, closed_pack.table
        ) == payload_of(closed_pack)
        assert sorted(open_descriptors(path)) == sorted(before)
        backend = open_store()
        assert caught.value.__traceback__ is not None
        backend.commit(
            closed_pack.namespace, CommitBatch([sample_pack(closed_pack.namespace, 2)])
        )
        assert len(tables(reader, closed_pack.namespace)) == 2
