"""What only the medium in a directory has: files, modes, links, writers that die, and errors of the
file system."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import pytest

from persistkv.storage.blobs import BlobMissingError, RefusedError, UnavailableError
from persistkv_dir import DirBlobs
from tests import forked

DAY_S = 24 * 3600


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "mounted" / "store"


@pytest.fixture
def blobs(root: Path) -> Iterator[DirBlobs]:
    with closing(DirBlobs(root)) as blobs:
        yield blobs


def read(blobs: DirBlobs, name: str, length: int = 100) -> bytes:
    data = bytearray(length)
    return bytes(data[: blobs.read(name, 0, len(data), [memoryview(data)])])


def names_of(blobs: DirBlobs, prefix: str = "") -> list[str]:
    return [info.name for info in blobs.list(prefix)]


def hidden_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.name.startswith(".")]


def run(program: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


# Creation and modes


def test_put_creates_root_with_private_modes(root: Path, blobs: DirBlobs) -> None:
    before = os.umask(0)
    try:
        blobs.put("a/b", [b"data"])
    finally:
        os.umask(before)
    for directory in (root.parent, root, root / "a"):
        assert directory.stat().st_mode & 0o777 == 0o700
    assert (root / "a/b").stat().st_mode & 0o777 == 0o600


def test_missing_root_is_not_created_by_reads(root: Path, blobs: DirBlobs) -> None:
    with pytest.raises(BlobMissingError):
        read(blobs, "a/b")
    blobs.delete(["a/b"])
    assert names_of(blobs) == []
    assert not root.parent.exists()


def test_read_only_medium_refuses_changes(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a/b", [b"data"])
    with closing(DirBlobs(root, read_only=True)) as reader:
        assert read(reader, "a/b") == b"data"
        with pytest.raises(RefusedError, match="reading only"):
            reader.put("a/c", [b"data"])
        with pytest.raises(RefusedError, match="reading only"):
            reader.delete(["a/b"])
    assert names_of(blobs) == ["a/b"]


def test_read_only_medium_never_creates_root(root: Path) -> None:
    with closing(DirBlobs(root, read_only=True)) as reader, pytest.raises(RefusedError):
        reader.put("a", [b"data"])
    assert not root.parent.exists()


def test_root_that_disappears_is_unavailable(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a/b", [b"data"])
    root.rename(root.with_name("elsewhere"))  # as if it were unmounted
    calls: list[Callable[[], object]] = [
        lambda: names_of(blobs),
        lambda: read(blobs, "a/b"),
        lambda: blobs.put("a/c", [b"data"]),
        lambda: blobs.delete(["a/b"]),
    ]
    for call in calls:
        with pytest.raises(UnavailableError, match="disappeared"):
            call()
    assert not root.exists()

    root.with_name("elsewhere").rename(root)
    assert read(blobs, "a/b") == b"data"


def test_emptied_root_receives_blobs_again(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a/b", [b"data"])
    (root / "a").rename(root.with_name("elsewhere"))
    assert names_of(blobs) == []
    blobs.put("a/c", [b"data"])
    assert names_of(blobs) == ["a/c"]


def test_root_that_is_a_file_is_refused(root: Path, blobs: DirBlobs) -> None:
    root.parent.mkdir()
    root.write_bytes(b"precious")
    with pytest.raises(RefusedError, match="not a directory"):
        blobs.put("a", [b"data"])
    with pytest.raises(RefusedError, match="not a directory"):
        names_of(blobs)
    assert root.read_bytes() == b"precious"


# Other content of the directory


def test_links_are_not_followed(root: Path, tmp_path: Path, blobs: DirBlobs) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"precious")
    blobs.put("a/b", [b"data"])
    (root / "a/link").symlink_to(outside / "secret")
    (root / "directory").symlink_to(outside)

    for name in ("a/link", "directory/secret"):
        with pytest.raises(BlobMissingError):
            read(blobs, name)
    assert names_of(blobs) == ["a/b"]
    assert names_of(blobs, "directory/") == []

    blobs.delete(["directory/secret"])
    with pytest.raises(RefusedError):
        blobs.put("directory/new", [b"data"])
    blobs.put("a/link", [b"replaced"])
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]
    assert (outside / "secret").read_bytes() == b"precious"
    assert read(blobs, "a/link") == b"replaced"


def test_root_behind_a_link_is_used(
    root: Path,
    tmp_path: Path,
    blobs: DirBlobs,
) -> None:
    blobs.put("a", [b"data"])
    link = tmp_path / "link"
    link.symlink_to(root)
    with closing(DirBlobs(link)) as other:
        assert read(other, "a") == b"data"


@pytest.mark.timeout(30)
def test_files_that_are_no_regular_ones_do_not_exist(
    root: Path,
    blobs: DirBlobs,
) -> None:
    blobs.put("a/b", [b"data"])
    os.mkfifo(root / "a/fifo")
    (root / "a/directory").mkdir()
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(os.path.relpath(root / "a/socket"))
    for name in ("a/fifo", "a/directory", "a/socket", "a/b/c"):
        with pytest.raises(BlobMissingError):
            read(blobs, name)
    assert names_of(blobs) == ["a/b"]
    blobs.delete(["a/directory", "a/b/c"])
    assert (root / "a/directory").is_dir()


def test_other_files_are_not_listed(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a/b", [b"data"])
    for name in (
        "README",
        ".hidden",
        "b.txt",
        "ä",
        ".nfs0000000000000001",
        "b~",
        "x" * 210,
    ):
        (root / "a" / name).write_bytes(b"junk")
    (root / "lost+found").mkdir()
    (root / "Upper").mkdir()
    (root / "Upper/a").write_bytes(b"junk")
    (root / os.fsdecode(b"a/\xff\xfe")).write_bytes(b"junk")
    assert names_of(blobs) == ["a/b"]


def test_list_of_too_deep_directories_ends(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a", [b"data"])
    deep = root
    for _ in range(600):  # more than the stack of recursive calls
        deep = deep / "d"
        deep.mkdir()
    (deep / "file").write_bytes(b"junk")
    assert names_of(blobs) == ["a"]


def test_put_name_that_is_a_directory_is_refused(root: Path, blobs: DirBlobs) -> None:
    blobs.put("a/b", [b"data"])
    with pytest.raises(RefusedError, match="EISDIR"):
        blobs.put("a", [b"data"])
    with pytest.raises(RefusedError, match="ENOTDIR"):
        blobs.put("a/b/c", [b"data"])
    assert names_of(blobs) == ["a/b"]
    assert hidden_files(root) == []


# Temporary files


def temporary_of(root: Path, blobs: DirBlobs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the temporary file that a writer leaves that died before it renamed it."""
    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", raising(OSError(errno.EIO, "died")))
        patched.setattr(os, "unlink", raising(OSError(errno.EIO, "died")))
        with pytest.raises(UnavailableError):
            blobs.put("a/dead", [b"data"])
    (left,) = hidden_files(root)
    return left


def raising(error: OSError) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_temporary_file_of_dead_writer_is_hidden_and_removed_after_a_day(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = temporary_of(root, blobs, monkeypatch)
    blobs.put("a/b", [b"data"])
    assert names_of(blobs) == ["a/b"]
    assert left.exists()

    other = left.with_name(".precious")
    other.write_bytes(b"of somebody else")
    old = time.time() - DAY_S - 60
    for path in (left, other):
        os.utime(path, (old, old))
    assert names_of(blobs) == ["a/b"]
    assert not left.exists()
    assert other.exists()


def test_temporary_file_is_kept_without_servers_time(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = temporary_of(root, blobs, monkeypatch)
    old = time.time() - DAY_S - 60
    os.utime(left, (old, old))
    # the local clock does not count
    monkeypatch.setattr(time, "time", lambda: old + 1e9)
    with (
        closing(DirBlobs(root, read_only=True)) as reader,
        closing(DirBlobs(root)) as fresh,
    ):
        assert names_of(reader) == []
        assert names_of(fresh) == []
    assert left.exists()


def test_put_whose_temporary_file_was_removed_writes_again(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = os.rename

    def remove_and_rename(source: str, target: str, **descriptors: int) -> None:
        monkeypatch.setattr(os, "rename", rename)
        os.unlink(source, dir_fd=descriptors["src_dir_fd"])
        rename(source, target, **descriptors)

    blobs.put("a/b", [b"old"])
    monkeypatch.setattr(os, "rename", remove_and_rename)
    blobs.put("a/b", [b"new"])
    assert read(blobs, "a/b") == b"new"


def test_put_failed_piece_leaves_nothing(root: Path, blobs: DirBlobs) -> None:
    with pytest.raises(TypeError):
        blobs.put("a/b", [b"data", "no bytes"])  # type: ignore[list-item]
    assert names_of(blobs) == []
    assert hidden_files(root) == []


# Writers that die

DIE_IN_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from persistkv_dir import DirBlobs

root, number, when = Path(sys.argv[1]), 0, sys.argv[2]
steps = ("open", "mkdir", "writev", "fsync", "fstat", "rename")

def die_in_step(fatal):
    global number
    number = 0
    def wrap(call):
        def step(*arguments, **named):
            global number
            number += 1
            if number == fatal and when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == fatal and when == "within" and call is writev:
                call(arguments[0], [arguments[1][0][:1000]])
                os.kill(os.getpid(), signal.SIGKILL)
            mine = number
            try:
                return call(*arguments, **named)
            finally:
                if mine == fatal and when != "before":
                    os.kill(os.getpid(), signal.SIGKILL)
        return step
    writev = os.writev
    for name in steps:
        setattr(os, name, wrap(getattr(os, name)))

fatal = 0
status = None
while status != 0:
    fatal += 1
    directory = root / str(fatal)
    blobs = DirBlobs(directory)
    if sys.argv[3] == "replaced":
        blobs.put("a/latest", [b"old" * 1000])
    child = os.fork()
    if child == 0:
        die_in_step(fatal)
        blobs.put("a/latest", [b"new" * 1000, b"new" * 1000])
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, -signal.SIGKILL), status
    print(fatal, flush=True)
"""


@pytest.mark.parametrize("kind", ["first", "replaced"])
@pytest.mark.parametrize("when", ["before", "within", "after"])
def test_writer_killed_in_each_step_leaves_whole_blobs(
    tmp_path: Path,
    when: str,
    kind: str,
) -> None:
    done = run(DIE_IN_EACH_STEP, tmp_path, when, kind)
    assert done.returncode == 0, done.stderr
    steps = done.stdout.split()
    assert len(steps) > 8

    old, new = b"old" * 1000, b"new" * 2000
    results = []
    for step in steps:
        with closing(DirBlobs(tmp_path / step)) as blobs:
            listed = {info.name: info.size for info in blobs.list("")}
            found = read(blobs, "a/latest", 10_000) if listed else None
            assert listed == ({} if found is None else {"a/latest": len(found)})
            results.append(found)

            blobs.put("a/latest", [b"newest"])
            assert read(blobs, "a/latest") == b"newest"
    before = old if kind == "replaced" else None
    assert set(results) == {before, new}
    # new once it is renamed
    assert results == sorted(results, key=lambda found: found == new)


KILLED_WRITER = """
import sys
from pathlib import Path
from persistkv_dir import DirBlobs

blobs = DirBlobs(Path(sys.argv[1]))
for number in range(1_000_000):
    blobs.put(f"{number % 3}/{number}", [number.to_bytes(8, "little") * 20_000])
    print(number, flush=True)
"""


def test_writer_killed_at_any_time_keeps_acknowledged_blobs(tmp_path: Path) -> None:
    for attempt in range(3):
        root = tmp_path / str(attempt)
        process = forked.Popen(
            [sys.executable, "-c", KILLED_WRITER, str(root)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        acknowledged = [process.stdout.readline() for _ in range(5)]
        time.sleep(0.05 * attempt)
        process.send_signal(signal.SIGKILL)
        acknowledged += process.stdout.readlines()
        process.wait(60)
        process.stdout.close()

        with closing(DirBlobs(root)) as blobs:
            listed = set(names_of(blobs))
            for line in acknowledged:
                assert f"{int(line) % 3}/{int(line)}" in listed
            for name in listed:
                number = int(name.partition("/")[2])
                assert (
                    read(blobs, name, 200_000) == number.to_bytes(8, "little") * 20_000
                )


# Durability


def test_put_syncs_file_then_directory_after_rename(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = recorded_steps(monkeypatch)
    blobs.put("a/b", [b"data"])
    synced = [os.path.relpath(path, root) for step, path in steps if step == "fsync"]
    assert [os.path.basename(path).startswith(".") for path in synced[-2:]] == [
        True,
        False,
    ]
    assert synced[-1] == "a"
    assert [step for step, _ in steps][-3:] == ["fsync", "rename", "fsync"]
    # the entries of new directories are durable before the blob is
    assert {"..", ".", "../.."} <= set(synced[:-2])


def test_put_syncs_directories_that_another_process_created(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (root / "a/b").mkdir(parents=True)
    steps = recorded_steps(monkeypatch)
    blobs.put("a/b/c", [b"data"])
    synced = {os.path.relpath(path, root) for step, path in steps if step == "fsync"}
    assert {"..", ".", "a", "a/b"} <= synced

    steps.clear()
    blobs.put("a/b/d", [b"data"])
    assert [step for step, _ in steps] == ["fsync", "rename", "fsync"]


def recorded_steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Record syncs with their paths, and renames."""
    steps: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def record_fsync(descriptor: int) -> None:
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def record_rename(source: str, target: str, **descriptors: int) -> None:
        steps.append(("rename", target))
        rename(source, target, **descriptors)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "rename", record_rename)
    return steps


def test_put_paused_before_rename_returns_time_of_rename(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rename = os.rename

    def pause_and_rename(source: str, target: str, **descriptors: int) -> None:
        time.sleep(1.5)
        rename(source, target, **descriptors)

    monkeypatch.setattr(os, "rename", pause_and_rename)
    returned = blobs.put("a/b", [b"data"])
    (info,) = blobs.list("")
    assert returned - info.time >= 1.4


# Errors of the file system

LIMITED = """
import resource, sys
from pathlib import Path
from persistkv.storage.blobs import RefusedError
from persistkv_dir import DirBlobs

blobs = DirBlobs(Path(sys.argv[1]))
blobs.put("a/small", [bytes(1000)])
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    blobs.put("a/large", [bytes(60_000), bytes(60_000)])
except RefusedError as error:
    print(error)
"""


def test_put_above_file_size_limit_is_refused_and_leaves_nothing(root: Path) -> None:
    done = run(LIMITED, root)
    assert done.returncode == 0, done.stderr
    assert str(root / "a/large") in done.stdout
    assert "EFBIG" in done.stdout
    assert [path.name for path in (root / "a").iterdir()] == ["small"]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, RefusedError),
        (errno.EDQUOT, RefusedError),
        (errno.EROFS, RefusedError),
        (errno.EPERM, RefusedError),
        (errno.EIO, UnavailableError),
        (errno.ETIMEDOUT, UnavailableError),
    ],
    ids=errno.errorcode.get,
)
@pytest.mark.parametrize("step", ["writev", "fsync", "rename"])
def test_put_error_of_file_system_is_translated(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    code: int,
    expected: type[Exception],
) -> None:
    blobs.put("a/b", [b"old"])
    with monkeypatch.context() as patched:
        patched.setattr(os, step, raising(OSError(code, os.strerror(code))))
        with pytest.raises(expected, match=errno.errorcode[code]) as caught:
            blobs.put("a/b", [b"new"])
    assert str(root / "a/b") in str(caught.value)
    assert read(blobs, "a/b") == b"old"
    assert hidden_files(root) == []


def test_put_failed_sync_of_directory_is_unknown_outcome(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs.put("a/b", [b"old"])
    calls = iter([os.fsync, raising(OSError(errno.ENOSPC, "full"))])
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", lambda descriptor: next(calls)(descriptor))
        with pytest.raises(UnavailableError, match="ENOSPC"):
            blobs.put("a/b", [b"new"])
    assert read(blobs, "a/b") == b"new"


FORBIDDEN = """
import sys
from pathlib import Path
from persistkv_dir import DirBlobs

root = Path(sys.argv[1])
blobs = DirBlobs(root)
blobs.put("a/b", [b"data"])
blobs.put("c/d", [b"data"])
(root / "a/b").chmod(0)
(root / "a").chmod(0o500)
data = memoryview(bytearray(4))
for call in (
    lambda: blobs.read("a/b", 0, 4, [data]),
    lambda: blobs.delete(["a/b", "c/d"]),
    lambda: blobs.put("a/c", [b"data"]),
    lambda: blobs.put("a/b", [b"data"]),
):
    try:
        call()
    except Exception as error:
        print(type(error).__name__, error)
print([info.name for info in blobs.list("")])
(root / "a").chmod(0)
try:
    print([info.name for info in blobs.list("")])
except Exception as error:
    print(type(error).__name__, error)
"""


def test_forbidden_file_and_directory_are_refused(root: Path) -> None:
    command = [sys.executable, "-c", FORBIDDEN, str(root)]
    if os.geteuid() == 0:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            pytest.skip("root may read everything, and setpriv is not installed")
        command = [setpriv, "--bounding-set=-all", "--inh-caps=-all", *command]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr

    *refused, listed, unreadable = done.stdout.splitlines()
    assert len(refused) == 4
    for line in (*refused, unreadable):
        assert line.startswith("RefusedError")
        assert "EACCES" in line
    assert str(root / "a/b") in refused[0]
    assert listed == "['a/b']"  # c/d was deleted


def test_delete_failed_file_does_not_keep_others(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a/1", "a/2", "b/1"):
        blobs.put(name, [b"data"])
    unlink = os.unlink

    def refuse_one(name: str, **descriptors: int) -> None:
        if name == "1":
            raise PermissionError(errno.EPERM, "immutable")
        unlink(name, **descriptors)

    monkeypatch.setattr(os, "unlink", refuse_one)
    with pytest.raises(RefusedError, match="a/1: EPERM"):
        blobs.delete(["a/1", "a/2", "b/1"])
    assert names_of(blobs) == ["a/1", "b/1"]


# Files that another machine replaces: a server of NFS answers ESTALE


def stale_once(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], bool]) -> None:
    """Let the first call of preadv at a matching offset raise ESTALE."""
    preadv = os.preadv

    def fail_once(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if when(offset):
            monkeypatch.setattr(os, "preadv", preadv)
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", fail_once)


def test_read_stale_file_is_opened_again(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs.put("a/b", [b"0123456789"])
    stale_once(monkeypatch, lambda offset: offset == 0)
    assert read(blobs, "a/b") == b"0123456789"
    stale_once(monkeypatch, lambda offset: offset == 4)
    parts = [bytearray(4) for _ in range(2)]
    assert blobs.read("a/b", 0, 8, map(memoryview, parts)) == 8
    assert b"".join(parts) == b"01234567"


def test_read_deleted_stale_file_is_missing(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs.put("a/b", [b"0123456789"])

    def buffers() -> Iterator[memoryview]:
        yield memoryview(bytearray(4))
        blobs.delete(["a/b"])
        yield memoryview(bytearray(4))

    stale_once(monkeypatch, lambda offset: offset == 4)
    with pytest.raises(BlobMissingError):
        blobs.read("a/b", 0, 8, buffers())


def test_read_replaced_stale_file_never_mixes_blobs(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs.put("a/b", [b"0123456789"])

    def buffers() -> Iterator[memoryview]:
        yield memoryview(bytearray(4))
        blobs.put("a/b", [b"abcdefghij"])
        yield memoryview(bytearray(4))

    stale_once(monkeypatch, lambda offset: offset == 4)
    with pytest.raises(UnavailableError, match="replaced"):
        blobs.read("a/b", 0, 8, buffers())
    assert read(blobs, "a/b") == b"abcdefghij"


def test_read_closes_files_after_errors(
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    blobs.put("a/b", [b"0123456789"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        stale_once(monkeypatch, lambda offset: offset == 0)
        assert read(blobs, "a/b") == b"0123456789"
        with pytest.raises(BlobMissingError):
            read(blobs, "a/c")
        with pytest.raises(RefusedError):
            blobs.put("a", [b"data"])
        next(blobs.list(""))
    assert len(os.listdir("/proc/self/fd")) == before


# Directories that change while they are listed


def test_list_entry_that_becomes_another_kind_is_skipped(
    root: Path,
    blobs: DirBlobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("a/1", "b/1", "c", "d"):
        blobs.put(name, [b"data"])
    listed = blobs.list("")
    assert next(listed).name == "a/1"
    (root / "b").rename(root / "e")
    (root / "b").symlink_to(root / "e")
    (root / "c").unlink()
    os.mkfifo(root / "c")
    assert [info.name for info in listed] == ["d"]


def test_list_includes_every_durable_blob_while_others_replace(
    root: Path,
    blobs: DirBlobs,
) -> None:
    durable = [f"a/{number:04}" for number in range(500)]
    for name in durable:
        blobs.put(name, [b"data"])
    ended = threading.Event()

    def replace() -> None:
        while not ended.is_set():
            for number in range(100):
                blobs.put(f"a/other-{number}", [b"data"])
            blobs.delete([f"a/other-{number}" for number in range(0, 100, 2)])

    thread = threading.Thread(target=replace)
    thread.start()
    try:
        for _ in range(30):
            listed = names_of(blobs, "a/")
            assert [
                name for name in listed if not name.startswith("a/other")
            ] == durable
    finally:
        ended.set()
        thread.join()


def test_limits_of_open_files_do_not_depend_on_size_of_listing(
    root: Path,
    blobs: DirBlobs,
) -> None:
    for number in range(300):
        blobs.put(f"{number}/a", [b"data"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 20, hard)
    )
    try:
        assert len(names_of(blobs)) == 300
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
