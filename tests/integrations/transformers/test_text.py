"""Prompts and answers as text, with the tokenizer of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from persistkv import ConfigurationError, Engine

CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hello"},
]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user'] %}"
    "{{ raise_exception('an unknown role') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose token ids are those of single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise)


@pytest.fixture(scope="module")
def checkpoint(
    model: LlamaForCausalLM,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """Return the directory of a model with a tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    with Engine.open(checkpoint, cpu_bytes="1MiB") as opened:
        yield opened


def test_generate_text_returns_tokens_and_text_of_its_token_ids(engine: Engine) -> None:
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode("How are you? ünï")
    result = engine.generate("How are you? ünï", 12)
    assert result.stats.prompt_tokens == len(ids)
    assert result.tokens == engine.generate(ids, 12).tokens
    assert result.text == tokenizer.decode(list(result.tokens))
    assert repr(result.text)[:10] in repr(result)


def test_generate_chat_uses_chat_template(engine: Engine) -> None:
    text = "<system>be brief<user>hello<assistant>"
    assert engine.generate(CHAT, 8).tokens == engine.generate(text, 8).tokens


def test_stream_texts_together_are_text_of_result(engine: Engine) -> None:
    for seed in range(5):
        stream = engine.stream("Bonjour", 40, temperature=1.5, seed=seed)
        texts = [token.text for token in stream]
        assert "".join(texts) == stream.finish().text


def test_stream_text_of_a_character_of_several_tokens_comes_with_its_last(
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = byte_tokenizer().encode("aé€b")
    given = iter(answer)
    sampler = "persistkv.integrations.transformers.request.Sampler.choose"
    monkeypatch.setattr(sampler, lambda *_: next(given))
    texts = [token.text for token in engine.stream("x", len(answer))]
    assert texts == ["a", "", "é", "", "", "€", "b"]


def test_generate_text_that_tokenizer_refuses_raises(model: LlamaForCausalLM) -> None:
    words = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}))
    )
    with (
        Engine.open(model, cpu_bytes="1MiB", tokenizer=words) as engine,
        pytest.raises(ConfigurationError, match=r"the tokenizer accepts \(WordLevel"),
    ):
        engine.generate("b", 1)


def test_generate_message_that_template_refuses_raises(engine: Engine) -> None:
    with pytest.raises(ConfigurationError, match=r"a chat of 1 messages.*unknown role"):
        engine.generate([{"role": "tool", "content": "x"}], 1)


def test_generate_text_without_tokenizer_raises_naming_remedy(
    model: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    model.save_pretrained(tmp_path)
    with Engine.open(tmp_path, cpu_bytes="1MiB") as engine:
        assert engine.generate([1, 2, 3], 2).text is None
        with pytest.raises(
            ConfigurationError, match=r"token ids, or a tokenizer: .*none"
        ):
            engine.generate("hello", 1)
    with Engine.open(model, cpu_bytes="1MiB") as engine:
        with pytest.raises(ConfigurationError, match="tokenizer="):
            engine.generate("hello", 1)
        with pytest.raises(ConfigurationError, match="tokenizer="):
            engine.generate(CHAT, 1)


def test_generate_chat_without_template_raises(model: LlamaForCausalLM) -> None:
    with Engine.open(model, cpu_bytes="1MiB", tokenizer=byte_tokenizer()) as engine:
        assert engine.generate("hello", 1).text is not None
        with pytest.raises(ConfigurationError, match="no chat template"):
            engine.generate(CHAT, 1)


def test_open_model_object_with_tokenizer_of_checkpoint_takes_text(
    model: LlamaForCausalLM,
    checkpoint: Path,
) -> None:
    with Engine.open(model, cpu_bytes="1MiB", tokenizer=checkpoint) as engine:
        assert engine.generate(CHAT, 2).text is not None
