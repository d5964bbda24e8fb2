"""RegionFile with real processes: races, crashes, leftovers, inherited descriptors, too little
memory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from persistkv.cpu.region_file import RegionFile, region_path, remove_leftover_regions
from persistkv.errors import ConfigurationError, RegionError

SIZE = 1 << 20

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start() -> Iterator[Start]:
    """Return a function that starts Python code in a new process with ``path`` and ``size``; kill
    it afterwards."""
    processes: list[subprocess.Popen[str]] = []

    def run(code: str, path: str, size: int = SIZE) -> subprocess.Popen[str]:
        script = (
            "import os, sys, time\nfrom persistkv.cpu.region_file import RegionFile\n"
            f"path, size = {path!r}, {size}\n{textwrap.dedent(code)}"
        )
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        with process:
            pass


HOLD = """
    file = RegionFile.open(path, size, 10)
    print("created" if file.created else "attached", flush=True)
    sys.stdin.readline()
    file.close()
"""


def line(process: subprocess.Popen[str]) -> str:
    stream: IO[str] | None = process.stdout
    assert stream is not None
    return stream.readline().strip()


@pytest.fixture
def path(shared_memory: str) -> str:
    return region_path("engine", shared_memory)


def test_open_eight_processes_race_one_creates_file(start: Start, path: str) -> None:
    workers = [start(HOLD, path) for _ in range(8)]
    assert sorted(map(line, workers)) == ["attached"] * 7 + ["created"]
    assert os.stat(path).st_size == SIZE
    for number, worker in enumerate(workers):
        assert Path(path).exists(), f"removed although {8 - number} processes use it"
        worker.communicate("\n")
    assert not Path(path).exists()


def test_open_eight_processes_replace_leftover_with_empty_file(
    start: Start,
    path: str,
) -> None:
    killed = start(HOLD, path)
    assert line(killed) == "created"
    before = os.stat(path).st_ino
    with open(path, "r+b") as stale:
        stale.write(b"stale")
    killed.kill()
    killed.wait()
    workers = [start(HOLD, path) for _ in range(8)]
    assert sorted(map(line, workers)) == ["attached"] * 7 + ["created"]
    assert os.stat(path).st_ino != before
    assert Path(path).read_bytes() == bytes(SIZE)


def test_open_creator_killed_while_allocating_creates_file(
    start: Start,
    path: str,
) -> None:
    creator = start(
        """
        def never(fd, offset, length):
            print("allocating", flush=True)
            time.sleep(60)
        os.posix_fallocate = never
        RegionFile.open(path, size, 10)
        """,
        path,
    )
    assert line(creator) == "allocating"
    opened: list[RegionFile] = []
    waiter = threading.Thread(
        target=lambda: opened.append(RegionFile.open(path, SIZE, 20))
    )
    waiter.start()
    waiter.join(0.2)
    assert waiter.is_alive()
    assert os.stat(path).st_size == 0
    creator.kill()
    waiter.join()
    assert opened[0].created
    assert os.fstat(opened[0].fd).st_size == SIZE
    opened[0].close()


def test_region_file_in_use_is_not_removed_or_resized(
    start: Start,
    path: str,
    shared_memory: str,
) -> None:
    owner = start(HOLD, path)
    line(owner)
    before = os.stat(path).st_ino
    assert remove_leftover_regions(shared_memory) == []
    with pytest.raises(
        RegionError, match=f"has {SIZE} bytes.*expected {2 * SIZE} within 0.1 s"
    ):
        RegionFile.open(path, 2 * SIZE, 0.1)
    file = RegionFile.open(path, SIZE, 1)
    assert not file.created
    file.close()
    assert os.stat(path).st_ino == before


def test_remove_leftover_regions_killed_owner_removes_only_its_file(
    start: Start,
    shared_memory: str,
) -> None:
    paths = [region_path(name, shared_memory) for name in ("killed", "live")]
    killed, live = (start(HOLD, path) for path in paths)
    assert (line(killed), line(live)) == ("created", "created")
    other = Path(shared_memory, "somebody-elses.mmap")
    other.touch()
    killed.kill()
    killed.wait()
    assert remove_leftover_regions(shared_memory) == paths[:1]
    assert other.exists()
    assert Path(paths[1]).exists()


def test_remove_leftover_regions_child_inherited_descriptor_removes(
    start: Start,
    path: str,
    shared_memory: str,
) -> None:
    owner = start(
        """
        import mmap, subprocess
        file = RegionFile.open(path, size, 10)
        code = f"import mmap, sys, time; m = mmap.mmap({file.fd}, 0); print('mapped', flush=True); sys.stdin.readline()"
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[file.fd])
        time.sleep(60)
        """,
        path,
    )
    assert line(owner) == "mapped"
    assert remove_leftover_regions(shared_memory) == []
    owner.kill()
    owner.wait()
    assert remove_leftover_regions(shared_memory) == [path]
    # the child that inherited the descriptor reads the same pipe, and exits
    owner.communicate("\n")


def test_close_in_forked_child_keeps_file(start: Start, path: str) -> None:
    owner = start(
        """
        file = RegionFile.open(path, size, 10)
        child = os.fork()
        if child == 0:
            file.close()
            os._exit(0)
        os.waitpid(child, 0)
        print(os.path.exists(path), flush=True)
        sys.stdin.readline()
        """,
        path,
    )
    assert line(owner) == "True"
    assert remove_leftover_regions(os.path.dirname(path)) == []


def test_close_last_user_removes_file(path: str) -> None:
    first, second = (RegionFile.open(path, SIZE, 1) for _ in range(2))
    assert (first.created, second.created) == (True, False)
    first.close()
    assert Path(path).exists()
    second.close()
    second.close()
    assert not Path(path).exists()


def test_open_file_removed_before_lock_creates_it_again(
    path: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is removed between its creation and its lock is created again."""
    real_open = os.open
    removed: list[str] = []

    def open_and_remove(name: str, flags: int, mode: int = 0o777) -> int:
        fd = real_open(name, flags, mode)
        if flags & os.O_CREAT and not removed:
            removed.extend(remove_leftover_regions(os.path.dirname(path)))
        return fd

    monkeypatch.setattr(os, "open", open_and_remove)
    file = RegionFile.open(path, SIZE, 1)
    assert removed == [path]
    assert os.path.samestat(os.stat(path), os.fstat(file.fd))
    file.close()


def test_open_too_little_memory_raises_and_leaves_nothing(
    path: str,
    shared_memory: str,
) -> None:
    filesystem = os.statvfs(shared_memory)
    too_much = filesystem.f_blocks * filesystem.f_frsize + 4096
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(
        ConfigurationError,
        match=f"total_size_bytes: {too_much}.*bytes free in {shared_memory}",
    ):
        RegionFile.open(path, too_much, 1)
    assert os.listdir(shared_memory) == []
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def small_tmpfs(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of 4 MiB."""
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "none", tmp_path], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs needs privileges")
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_open_tmpfs_full_waits_until_old_host_process_exits(
    small_tmpfs: Path,
    start: Start,
) -> None:
    """The host process of a killed engine keeps an unlinked file mapped until it exits."""
    host = start(
        """
        file = open(path, "w+b")
        os.posix_fallocate(file.fileno(), 0, size)
        os.unlink(path)
        print("held", flush=True)
        sys.stdin.readline()
        """,
        str(small_tmpfs / "old"),
        3 * SIZE,
    )
    assert line(host) == "held"
    assert host.stdin is not None
    threading.Timer(0.5, host.stdin.close).start()
    file = RegionFile.open(region_path("engine", str(small_tmpfs)), 3 * SIZE, 1)
    assert file.created
    file.close()


def test_open_missing_directory_raises(shared_memory: str) -> None:
    with pytest.raises(
        RegionError, match="cannot be created: No such file or directory"
    ):
        RegionFile.open(region_path("engine", f"{shared_memory}/nowhere"), SIZE, 1)


def test_open_symlink_raises_and_keeps_target(path: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    os.symlink(victim, path)
    with pytest.raises(RegionError, match="cannot be opened"):
        RegionFile.open(path, SIZE, 0.1)
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("name", ["", "a/b", "a\0b"])
def test_region_path_invalid_instance_id_raises(name: str) -> None:
    with pytest.raises(ConfigurationError, match="instance_id"):
        region_path(name)


def planted_file(path: str, mode: int) -> int:
    """Create a file of the expected size, as another program could, and lock it as an engine
    does."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.fchmod(fd, mode)
    os.ftruncate(fd, SIZE)
    fcntl.flock(fd, fcntl.LOCK_SH)
    return fd


@pytest.mark.parametrize("mode", [0o666, 0o640, 0o602])
def test_open_file_that_others_may_open_raises(path: str, mode: int) -> None:
    fd = planted_file(path, mode)
    with pytest.raises(RegionError, match=f"has mode {mode:o}"):
        RegionFile.open(path, SIZE, 1)
    os.close(fd)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root may give a file to another user"
)
@pytest.mark.parametrize("is_locked", [True, False])
def test_open_file_of_another_user_raises_and_keeps_it(
    path: str,
    shared_memory: str,
    is_locked: bool,
) -> None:
    fd = planted_file(path, 0o600)
    os.fchown(fd, 65534, 65534)
    if not is_locked:
        fcntl.flock(fd, fcntl.LOCK_UN)
    with pytest.raises(RegionError, match="belongs to user 65534"):
        RegionFile.open(path, SIZE, 1)
    assert remove_leftover_regions(shared_memory) == []
    assert Path(path).exists()
    os.close(fd)


def test_open_pipe_at_path_raises(path: str) -> None:
    os.mkfifo(path, 0o600)
    with open(os.open(path, os.O_RDWR), "rb") as pipe:
        fcntl.flock(pipe, fcntl.LOCK_SH)
        with pytest.raises(RegionError, match="is no regular file"):
            RegionFile.open(path, SIZE, 1)
