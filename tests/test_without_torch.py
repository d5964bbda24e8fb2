"""The library and the commands work without torch and transformers."""

from __future__ import annotations

import subprocess
import sys

HIDE = "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers', 'safetensors'))); "


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", HIDE + program, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_library_import_without_torch_succeeds() -> None:
    done = run(
        "import persistkv, persistkv.base, persistkv.storage.store, persistkv.tiering.base, "
        "persistkv_lmdb"
    )
    assert done.returncode == 0, done.stderr


def test_library_import_does_not_import_installed_torch() -> None:
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


def test_cli_help_without_torch_lists_commands() -> None:
    done = run(
        "from persistkv_tools.cli import main; sys.argv = ['persistkv', '--help']; main()"
    )
    assert done.returncode == 0, done.stderr
    assert "ls" in done.stdout
