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


def test_import_of_engine_without_torch_names_the_extra() -> None:
    for name in ("Engine", "load", "save"):
        done = run(f"from persistkv import {name}")
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last.endswith(
            'torch is not installed: pip install "persistkv[transformers]"'
        )


def test_import_error_of_engine_without_torch_can_be_caught() -> None:
    done = run(
        "\ntry:\n    from persistkv import Engine\n"
        "except ImportError as error:\n    print(type(error).__name__)"
    )
    assert done.stdout == "MissingExtraError\n", done.stderr


def test_dir_without_torch_lists_public_names() -> None:
    done = run("import persistkv; print(dir(persistkv) == sorted(persistkv.__all__))")
    assert done.stdout == "True\n", done.stderr
