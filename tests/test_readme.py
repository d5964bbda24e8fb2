"""What README.md shows is what happens: its example in Python, then its commands on the store that it made."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from persistkv_tools.cli import main

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

README = (Path(__file__).parents[1] / "README.md").read_text()
MODEL, STORE = "path/to/checkpoint", "/var/cache/kv"
TOKENS = [(7 * index * index + 3 * index) % 256 for index in range(100)]


def blocks() -> list[tuple[str, str]]:
    """(language, text) of each."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[list[str]]:
    """What stands behind a prompt."""
    lines = [line for _, block in blocks() for line in block.splitlines()]
    found = [line.removeprefix("$ ") for line in lines if line.startswith("$ persistkv ")]
    return [shlex.split(line, comments=True)[1:] for line in found]


@pytest.fixture
def checkpoint(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).eval().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The defaults are for real models: a primary tier of 1 GiB, say."""
    from persistkv.integrations.transformers import Engine

    monkeypatch.setitem(Engine.open.__func__.__kwdefaults__, "cpu_bytes", "4MiB")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def test_the_examples_work(checkpoint, small, tmp_path, capsys):
    (example,) = [block for language, block in blocks() if language == "python" and "Engine.open" in block]
    assert MODEL in example
    assert STORE in example
    example = example.replace(MODEL, str(checkpoint)).replace(STORE, f"{tmp_path}/kv")
    restored = []
    for _ in range(2):  # the second one is the restarted process
        exec(compile(example, "README.md", "exec"), {"token_ids": TOKENS})
        number, total = map(int, re.findall(r"\d+", capsys.readouterr().out))
        assert total == len(TOKENS)
        restored.append(number)
    assert restored == [0, 96]
    assert {command[0] for command in commands()} >= {"ls", "stat"}
    for command in commands():
        with pytest.raises(SystemExit) as ended:
            main([part.replace(STORE, f"{tmp_path}/kv") for part in command])
        shown = capsys.readouterr()
        assert ended.value.code in (0, None), (command, shown.err)
        assert shown.out
