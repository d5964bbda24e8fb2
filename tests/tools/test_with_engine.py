"""The commands with a real engine: transferred contexts are restored, and commands work while the
engine writes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.tools.conftest import Run

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from persistkv import Engine  # noqa: E402

PROMPT = [(7 * index * index + 3 * index) % 256 for index in range(100)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_engine(checkpoint: Path, url: str) -> Engine:
    return Engine.open(
        checkpoint,
        url,
        block_size=4,
        device_blocks=64,
        cpu_bytes="2MiB",
        codec="zstd:1",
    )


@pytest.mark.parametrize("scheme", ["lmdb", "file"])
def test_engine_copied_context_is_restored_exactly(
    start: Run,
    url: str,
    checkpoint: Path,
    tmp_path: Path,
    scheme: str,
) -> None:
    with open_engine(checkpoint, url) as first:
        cold = first.generate(PROMPT, 8)
        resident = first.generate(PROMPT, 8, store=False)
        assert first.wait_persisted(cold)
        pages = {
            block_hash: page.clone()
            for block_hash, page in first.resident_pages().items()
        }
        target = f"{scheme}://{tmp_path}/target?capacity=256MiB"
        request = json.loads(start("ls", url, "--json").stdout)["requests"][0]["id"]
        assert start("copy", url, target, request).returncode == 0
    with open_engine(checkpoint, target) as second:
        warm = second.generate(PROMPT, 8)
        assert (warm.stats.persistent_tokens, warm.stats.computed_tokens) == (96, 4)
        assert warm.tokens == cold.tokens
        assert torch.equal(warm.logits, resident.logits)
        restored = second.resident_pages()
        assert all(
            torch.equal(restored[block_hash], pages[block_hash])
            for block_hash in warm.block_hashes[:24]
        )
        assert second.notices == ()


KILLED_ENGINE = """
    import os, signal, sys
    from persistkv import Engine
    engine = Engine.open(sys.argv[1], sys.argv[2], block_size=4, device_blocks=64,
                         cpu_bytes="2MiB", codec="zstd:1")
    prompt = [(7 * index * index + 3 * index) % 256 for index in range(100)]
    result = engine.generate(prompt, 8, labels={"user": "anna"})
    assert result.stats.persistent_tokens == 96
    # before, the tiers may not know that the request has ended: its last blocks are being copied
    assert engine.wait_persisted(result)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_restore_of_killed_engine_counts_as_hit_and_as_saved(
    run: Run, url: str, checkpoint: Path
) -> None:
    with open_engine(checkpoint, url) as first:
        first.generate(PROMPT, 8)
        first.generate(PROMPT, 8)  # from the device: stored again, not restored
    program = textwrap.dedent(KILLED_ENGINE)
    killed = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint), url], check=False, timeout=120
    )
    assert killed.returncode == -signal.SIGKILL
    # its host writes the sums when it ends
    deadline = time.monotonic() + 60
    saved: list[tuple[str | None, int]] = []
    while not saved and time.monotonic() < deadline:
        time.sleep(0.05)
        rows = json.loads(run("stat", url, "--json").stdout)["savings"]
        saved = [(row["label"], row["tokens"]) for row in rows if row["tokens"]]
    assert saved == [(None, 96), ("user=anna", 96)]
    requests = json.loads(run("ls", url, "--json").stdout)["requests"]
    by_age = sorted(requests, key=lambda request: request["created"])
    assert by_age[0]["hits"] == 1
    assert len({request["context"] for request in requests}) == 1


def test_why_against_checkpoint_matches_store_of_engine(
    start: Run,
    url: str,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    with open_engine(checkpoint, url) as engine:
        assert engine.wait_persisted(engine.generate(PROMPT, 4))
    done = start("why", url, "--against", str(checkpoint), "--json")
    assert done.returncode == 0, done.stdout
    config = json.loads((checkpoint / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "model.safetensors").write_bytes(
        (checkpoint / "model.safetensors").read_bytes()
    )
    (other / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 4}))
    (comparison,) = json.loads(
        start("why", url, "--against", str(other), "--json").stdout
    )["comparisons"]
    assert comparison["differences"] == [
        {"field": "config.num_key_value_heads", "ours": 4, "theirs": 2}
    ]


def test_engine_pruned_context_is_computed_again(
    start: Run, url: str, checkpoint: Path
) -> None:
    with open_engine(checkpoint, url) as engine:
        result = engine.generate(PROMPT, 8)
        assert engine.wait_persisted(result)
        (namespace,) = json.loads(start("ls", url, "--json").stdout)["namespaces"]
        assert (
            start(
                "prune", url, "--namespace", namespace["id"], "--orphans", "--yes"
            ).returncode
            == 0
        )
        assert start("verify", url).returncode == 0
    with open_engine(checkpoint, url) as again:
        cold = again.generate(PROMPT, 8)
        assert (cold.stats.persistent_tokens, cold.tokens) == (0, result.tokens)
