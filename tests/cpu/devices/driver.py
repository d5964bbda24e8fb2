"""A CUDA driver that needs no GPU (``driver.c``), with streams and events: runs the CUDA strategy
on a CPU.

The product calls the driver's ``cuMemcpyBatchAsync`` through its binary interface; all copies are
in host memory.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import site
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

_SOURCE = Path(__file__).with_name("driver.c")


def find_compiler() -> str | None:
    """Return the path of a C compiler, or None."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


def find_header() -> Path | None:
    """Return the path of NVIDIA's ``cuda.h``, from a toolkit or a wheel of the CUDA runtime, or
    None."""
    homes = [
        Path(os.environ[name])
        for name in ("CUDA_HOME", "CUDA_PATH")
        if name in os.environ
    ]
    homes += [
        Path("/usr/local/cuda"),
        *sorted(Path("/usr/local").glob("cuda-*"), reverse=True),
    ]
    wheels = [
        path
        for directory in site.getsitepackages()
        for path in sorted(Path(directory, "nvidia").glob("*"))
    ]
    return next(
        (
            path
            for home in (*homes, *wheels)
            if (path := home / "include" / "cuda.h").is_file()
        ),
        None,
    )


def build_driver(directory: Path) -> Path:
    """Compile the driver; use NVIDIA's header if one is installed.

    :raises subprocess.CalledProcessError: the compilation failed; the compiler wrote the reason to
        standard error.
    """
    library, header = directory / "libcuda.so", find_header()
    checked = [] if header is None else ["-DHAVE_CUDA_H", f"-I{header.parent}"]
    options = ["-Wall", "-Wextra", "-Werror", "-O1", "-shared", "-fPIC"]
    subprocess.run(
        [str(find_compiler()), *options, *checked, "-o", str(library), str(_SOURCE)],
        check=True,
    )
    return library


class Driver:
    """The compiled driver; it also registers memory like the CUDA runtime
    (``shared_offload_region.CudaRuntime``)."""

    def __init__(self, library: Path) -> None:
        self.library = str(library)
        self._functions = ctypes.CDLL(self.library)
        self._functions.register_range.argtypes = (ctypes.c_size_t, ctypes.c_size_t)
        self._functions.unregister_range.argtypes = (ctypes.c_size_t,)
        self._functions.take_num_copies.restype = ctypes.c_size_t

    @property
    def interface(self) -> list[int]:
        """Sizes, offsets and constants, in the order of ``driver.c``."""
        return list((ctypes.c_size_t * 10).in_dll(self._functions, "interface"))

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int:
        return int(self._functions.register_range(address, size))

    def cudaHostUnregister(self, address: int, /) -> int:
        return int(self._functions.unregister_range(address))

    def take_num_copies(self) -> int:
        """Return the number of copies since the last call."""
        return int(self._functions.take_num_copies())


class Stream:
    """A stream that executes work as it is enqueued."""

    cuda_stream = 1
    log: list[str]
    """Operations of all streams and events, in order."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.broken = False

    def wait_stream(self, other: Stream) -> None:
        self.log.append("wait for the caller's stream")

    def synchronize(self) -> None:
        if self.broken:
            raise RuntimeError("device-side assert triggered")
        self.log.append("synchronize")


class Event:
    """An event of such a stream."""

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self._stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        self._stream = stream
        stream.log.append("record")

    def query(self) -> bool:
        assert self._stream is not None
        if self._stream.broken:
            raise RuntimeError("device-side assert triggered")
        return True

    def synchronize(self) -> None:
        self.query()

    def elapsed_time(self, end: Event) -> float:
        assert end._stream is self._stream
        return 1.0


@pytest.fixture(scope="session")
def driver_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_compiler() is None:
        pytest.skip("needs a C compiler")
    return build_driver(tmp_path_factory.mktemp("driver"))


@pytest.fixture
def driver(driver_library: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """The driver, with torch's streams and events replaced by ``Stream`` and ``Event``."""
    Stream.log = []
    caller = Stream()
    for name, value in (
        ("Stream", Stream),
        ("Event", Event),
        ("current_stream", lambda device=None: caller),
        ("stream", nullcontext),
        ("device", nullcontext),
    ):
        monkeypatch.setattr(torch.cuda, name, value)
    found = Driver(driver_library)
    found.take_num_copies()
    return found
