"""A short run of ``python -m tests.fuzz`` in a separate process, which limits its memory and
detects hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked

ROOT = Path(__file__).parents[2]


def fuzz(*arguments: str, prelude: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{prelude}\n"
    program += (
        f"sys.argv = ['fuzz', *{list(arguments)!r}]\nimport runpy; "
        f"runpy.run_module('tests.fuzz', run_name='__main__')"
    )
    return forked.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_fuzz_short_run_finds_no_violation() -> None:
    run = fuzz("--cases", "1000", "--seed", "1", "--limit-s", "60")
    assert run.returncode == 0, run.stderr
    assert "nothing found" in run.stdout


DISABLED_CHECKS = {
    "frame checksum": (
        "payload",
        "import persistkv.storage.format.seal as m; m._PlainFrames.open = lambda *_: None",
    ),
    "tag of a sealed frame": (
        "sealed frame",
        "import persistkv.storage.format.seal as m; m._KeyFrames.open = lambda *_: None",
    ),
    "seal of a record": (
        "sealed record",
        "import persistkv.storage.format.seal as m; m.open_record = lambda *_: b''",
    ),
    "errors of a forget record": (
        "forget records",
        "import persistkv.storage.shared.forgetting.records as m\n"
        "m.decode = lambda decoder, body, what: decoder.decode(body)",
    ),
    "errors of sealed content": (
        "sealed content",
        "import persistkv.storage.shared.format as m\n"
        "m.decode = lambda decoder, body, what: decoder.decode(body)",
    ),
    "frame table checks": (
        "table",
        "import persistkv.storage.format.pack as m; m._check_frames = lambda *_: None",
    ),
    "distinct keys": (
        "table",
        "import persistkv.storage.format.pack as m; m.PackedKeys.distinct = True",
    ),
    "decompressed size": (
        "codec",
        "import zstandard, persistkv.storage.format.codec as m\n"
        "def without_limit(stored, out):\n"
        "    raw = zstandard.ZstdDecompressor().decompress(stored)\n"
        "    out[:] = (raw + bytes(len(out)))[:len(out)]\n"
        "m.decompress_into = without_limit",
    ),
}


@pytest.mark.parametrize("name", DISABLED_CHECKS)
def test_fuzz_disabled_check_is_detected(name: str) -> None:
    target, prelude = DISABLED_CHECKS[name]
    run = fuzz("--cases", "20000", "--target", target, prelude=prelude)
    assert run.returncode != 0
    # Hypothesis shrinks the case and prints it as code
    assert "changes=[Edit(" in run.stderr
