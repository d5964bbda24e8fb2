from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_manifest, sample_pack
from persistkv_tools.cli import main
from tests import forked
from tests.tools.contexts import Contexts
from tests.tools.terminals import TESTED_CODE

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    """Return a function that runs the command line in this process, which is faster than a new
    process."""
    monkeypatch.chdir(tmp_path)

    def run_here(*arguments: str) -> subprocess.CompletedProcess[str]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        code = ended.value.code or 0
        assert isinstance(code, int)
        printed = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, printed.out, printed.err)

    return run_here


@pytest.fixture
def plug_ins(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Install a driver: the example ``sqlite``."""
    directory = tmp_path_factory.mktemp("plug-ins")
    info = directory / "drivers-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: drivers\nVersion: 1.0\n"
    )
    driver = "sqlite = persistkv_sqlite:SqliteBackend"
    (info / "entry_points.txt").write_text(f"[persistkv.backends]\n{driver}\n")
    monkeypatch.syspath_prepend(directory)


@pytest.fixture
def start(tmp_path: Path) -> Run:
    """Return a function that runs the command line in a process of its own: a new one if the
    interpreter has options."""

    def run_cli(
        *arguments: str,
        python: tuple[str, ...] = (),
        **environment: str,
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *python, "-m", "persistkv_tools", *arguments]
        run_program = subprocess.run if python else forked.run
        base = {
            "PATH": "/usr/bin:/bin",
            "HOME": str(tmp_path),
            "LANG": "C.UTF-8",
            "TZ": "UTC",
            **TESTED_CODE,
        }
        return run_program(
            command,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=base | environment,
            timeout=120,
            check=False,
        )

    return run_cli


@pytest.fixture
def url(tmp_path: Path) -> str:
    """URL of a store with inline payloads, the placement that most methods of ``Damage``
    require."""
    return f"lmdb://{tmp_path}/store?capacity=1GiB&placement=inline"


@pytest.fixture
def filled(url: str) -> Iterator[str]:
    """URL of a store of two namespaces and three requests; a writer keeps it open during the
    test."""
    with closing(open_backend(url)) as backend:
        for number, requests in enumerate((2, 1)):
            namespace = backend.open_namespace(
                Identity.of({"architecture": "Llama", "number": number})
            ).id
            packs = [
                sample_pack(namespace, 10 * number + request)
                for request in range(requests)
            ]
            manifests = [
                sample_manifest(f"engine-{number}-{request}", 10 * number + request)
                for request in range(requests)
            ]
            backend.commit(namespace, CommitBatch(packs, manifests))
        yield url


@pytest.fixture
def contexts(url: str) -> Iterator[tuple[str, Contexts]]:
    """URL of an empty store that stays open for writing, and a writer of requests to it."""
    with closing(open_backend(url)) as backend:
        yield url, Contexts(backend)
