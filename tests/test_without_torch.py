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
        "import persistkv, persistkv.base, persistkv.storage.store.store, persistkv.tiering.base, "
        "persistkv_lmdb"
    )
    assert done.returncode == 0, done.stderr


def test_library_import_does_not_import_installed_torch() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, persistkv.storage.host.server.child, persistkv_tools.cli; "
            "sys.exit(any(n in sys.modules for n in ('torch', 'transformers')))",
        ],
        timeout=60,
        check=False,
    )
    assert done.returncode == 0


IMPORTS = """
for name in ("Engine", "load", "save"):
    try:
        exec(f"from persistkv import {name}")
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_import_of_engine_without_torch_names_the_extra() -> None:
    done = run("\n" + IMPORTS)
    error = 'MissingExtraError torch is not installed: pip install "persistkv[transformers]"'
    assert done.stdout.splitlines() == [error] * 3, done.stderr


def test_dir_without_torch_lists_public_names() -> None:
    done = run("import persistkv; print(dir(persistkv) == sorted(persistkv.__all__))")
    assert done.stdout == "True\n", done.stderr
