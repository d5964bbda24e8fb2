"""The examples in the docs run unchanged, except for paths and sizes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from persistkv import Engine
from persistkv.config import convert_options
from persistkv.tiering.example import ExampleSecondaryTier
from persistkv.tiering.persistent import PersistentTier
from persistkv.tiering.spec import SECONDARY_TIERS, TieringOffloadingOptions
from persistkv_tools.cli import main

ROOT = Path(__file__).parents[2]
PROMPT = [(7 * index * index + 3 * index) % 256 for index in range(100)]
# they exit with 1 for a finding, which depends on the machine
COMMANDS_WITH_FINDINGS = ("doctor", "why")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("docs") / "checkpoint"
    torch.manual_seed(0)
    config = LlamaConfig(
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
    LlamaForCausalLM(config).save_pretrained(directory)
    vocabulary = {str(token): token for token in range(256)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="0"))
    words.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.chat_template = "{% for part in messages %}{{ part.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    return directory


Adapt = Callable[[str], str]


@pytest.fixture
def adapt(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Adapt:
    """Return a function that adapts an example to this machine: its model, its store, less memory,
    longer deadlines."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.txt").write_text(" ".join(map(str, PROMPT)))
    defaults = Engine.open.__func__.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "cpu_bytes", "64MiB")
    monkeypatch.setitem(defaults, "lookup_deadline_s", 100.0)
    # so small a model computes about as fast as a store loads
    monkeypatch.setitem(defaults, "load_policy", "always")

    def rewrite(text: str) -> str:
        text = text.replace("path/to/checkpoint", str(checkpoint)).replace(
            "/var/cache/kv", f"{tmp_path}/kv"
        )
        return text.replace('cpu_bytes="4GiB"', 'cpu_bytes="64MiB"')

    return rewrite


def examples(page: str, language: str) -> list[str]:
    fences = re.findall(
        r"^```(\w*)[^\n]*\n(.*?)^```",
        (ROOT / page).read_text(),
        re.MULTILINE | re.DOTALL,
    )
    return [text for name, text in fences if name == language]


@pytest.mark.parametrize(
    "page",
    ["README.md", pytest.param("docs/getting-started.md", marks=pytest.mark.slow)],
)
def test_quick_start_example_restores_blocks_and_commands_succeed(
    page: str,
    adapt: Adapt,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (example,) = examples(page, "python")
    restored = []
    for _ in range(2):
        exec(compile(adapt(example), page, "exec"), {"token_ids": PROMPT})
        shown = re.search(
            r"^(\d+) of 100 tokens restored", capsys.readouterr().out, re.M
        )
        assert shown is not None
        restored.append(int(shown[1]))
    assert restored == [0, 96], (
        "the second process restores all whole blocks before the last token"
    )

    lines = "".join(examples(page, "")).replace("$ ", "").splitlines()
    for name, value in (
        line.split()[1].split("=") for line in lines if line.startswith("export ")
    ):
        monkeypatch.setenv(name, adapt(value))
    commands = [
        line.partition("#")[0].split()[1:]
        for line in lines
        if line.startswith("persistkv ")
    ]
    assert len(commands) >= 2
    for command in commands:
        with pytest.raises(SystemExit) as end:
            main([adapt(word) for word in command])
        assert end.value.code in (
            (None, 0, 1) if command[0] in COMMANDS_WITH_FINDINGS else (None, 0)
        ), command


@pytest.mark.slow
def test_transformers_page_engine_options_generate_tokens(adapt: Adapt) -> None:
    example, _ = examples("docs/transformers.md", "python")
    namespace: dict[str, Any] = {"token_ids": PROMPT}
    exec(compile(adapt(example), "docs/transformers.md", "exec"), namespace)
    assert len(namespace["result"].tokens) == 64
    assert namespace["token"].text


def test_transformers_page_generate_second_run_restores_blocks(
    adapt: Adapt,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, example = examples("docs/transformers.md", "python")
    for restored in (0, 96):
        exec(
            compile(adapt(example), "docs/transformers.md", "exec"),
            {"token_ids": PROMPT},
        )
        assert capsys.readouterr().out == f"{restored} tokens came from the store\n"


def test_operating_page_store_example_finds_no_problems(
    adapt: Adapt,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = "".join(examples("docs/operating.md", "python"))
    with Engine.open(checkpoint, adapt("/var/cache/kv")) as engine:
        engine.generate(PROMPT, labels={"user": "anna"})
    exec(
        compile(adapt(example), "docs/operating.md", "exec"),
        namespace := {"__name__": "example"},
    )
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 4
    assert shown[-1] == "0 requests deleted"
    assert namespace["problems"] == []


def test_extending_page_faults_are_injected() -> None:
    exec(
        compile(
            examples("docs/extending.md", "python")[0], "docs/extending.md", "exec"
        ),
        {},
    )


def test_extending_page_tier_configuration_is_accepted() -> None:
    namespace: dict[str, Any] = {}
    exec(
        compile(
            examples("docs/extending.md", "python")[-1], "docs/extending.md", "exec"
        ),
        namespace,
    )
    options = convert_options(
        TieringOffloadingOptions, namespace["extra_config"], where="offloading"
    )
    assert [SECONDARY_TIERS.get(tier["type"]) for tier in options.secondary_tiers] == [
        ExampleSecondaryTier,
        PersistentTier,
    ]
