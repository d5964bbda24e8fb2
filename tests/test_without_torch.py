"""The library and the commands work without torch and transformers."""

from __future__ import annotations

import subprocess
import sys

HIDE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors'))); "


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + program, *arguments], capture_output=True, text=True, timeout=60, check=False
    )


def test_importing_the_library() -> None:
    done = run("import persistkv, persistkv.base, persistkv.storage.store, persistkv.tiering.base, persistkv_lmdb")
    assert done.returncode == 0, done.stderr


def test_importing_the_library_imports_no_torch_where_it_is_installed() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, persistkv.storage.host.child, persistkv_tools.cli; "
            "sys.exit(any(n in sys.modules for n in ('torch', 'transformers')))",
        ],
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


def test_the_command() -> None:
    done = run("from persistkv_tools.cli import main; sys.argv = ['persistkv', '--help']; main()")
    assert done.returncode == 0, done.stderr
    assert "ls" in done.stdout


def test_the_demo_says_what_it_needs() -> None:
    done = run("from persistkv_tools.cli import main; sys.argv = ['persistkv', 'demo']; main()")
    assert done.returncode == 2
    assert "persistkv[transformers]" in done.stderr
    assert "Traceback" not in done.stderr
