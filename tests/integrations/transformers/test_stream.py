"""Answers as iterators of tokens, alone, next to other requests, and left before their end."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from persistkv import ConfigurationError, Engine, EngineClosedError, PersistKVError


@pytest.fixture
def engine(model: LlamaForCausalLM, tmp_path: Path) -> Iterator[Engine]:
    store = tmp_path / "kv"
    with Engine.open(
        model, store, block_size=4, device_blocks=64, cpu_bytes="1MiB", host="thread"
    ) as opened:
        yield opened


def test_stream_yields_tokens_of_generate(engine: Engine, prompt: list[int]) -> None:
    expected = engine.generate(prompt, 8, load=False)
    stream = engine.stream(prompt, 8)
    assert [token.id for token in stream] == expected.tokens
    result = stream.finish()
    assert result.tokens == expected.tokens
    assert result.req_id == stream.req_id
    assert result.block_hashes == expected.block_hashes
    assert list(stream) == []


def test_stream_stop_token_is_its_last(engine: Engine, prompt: list[int]) -> None:
    whole = engine.generate(prompt, 8).tokens
    stream = engine.stream(prompt, 8, stop_token_ids=[whole[3]])
    assert [token.id for token in stream][-1] == whole[3]


def test_stream_invalid_option_raises_at_the_call(
    engine: Engine,
    prompt: list[int],
) -> None:
    with pytest.raises(ConfigurationError, match="temperature"):
        engine.stream(prompt, 8, temperature=-1)


def test_stream_computes_each_token_when_it_is_asked_for(
    engine: Engine,
    prompt: list[int],
) -> None:
    computed = []
    hook = engine.model.register_forward_hook(lambda *_: computed.append(1))
    try:
        stream = engine.stream(prompt, 8)
        assert not computed
        next(stream)
        assert len(computed) == 1
        next(stream)
        assert len(computed) == 2
    finally:
        hook.remove()
        stream.close()


def test_streams_and_generate_in_turns_return_tokens_of_each_alone(
    engine: Engine,
    prompt: list[int],
) -> None:
    prompts = [prompt[:40], prompt[20:60], prompt[60:]]
    alone = [engine.generate(one, 6, load=False).tokens for one in prompts]
    engine.forget_device()
    first = engine.stream(prompts[0], 6)
    second = engine.stream(prompts[1], 6)
    pairs = []
    for pair in zip(first, second, strict=True):
        pairs.append(pair)
        assert engine.generate(prompts[2], 6).tokens == alone[2]
    assert [token.id for token, _ in pairs] == alone[0]
    assert [token.id for _, token in pairs] == alone[1]


def test_closed_stream_ends_and_stores_what_it_computed(
    engine: Engine,
    prompt: list[int],
) -> None:
    with engine.stream(prompt, 50) as stream:
        token = next(stream)
    assert list(stream) == []
    assert stream.finish().tokens == [token.id]
    assert engine.wait_persisted(stream.req_id)
    engine.forget_device()
    assert engine.generate(prompt, 1).stats.restored_tokens == 96


def test_abandoned_stream_releases_its_device_blocks(
    engine: Engine,
    prompt: list[int],
) -> None:
    stream = engine.stream(prompt, 100)
    next(stream)
    del stream
    gc.collect()
    assert engine.generate(prompt[::-1], 150).stats.computed_tokens == 100


def test_stream_closed_before_first_token_has_no_result(
    engine: Engine,
    prompt: list[int],
) -> None:
    stream = engine.stream(prompt, 4)
    stream.close()
    with pytest.raises(PersistKVError, match="before its first token"):
        stream.finish()
    assert engine.stats().requests == 0


def test_second_stream_without_room_for_both_raises_and_first_goes_on(
    engine: Engine,
    prompt: list[int],
) -> None:
    expected = engine.generate(prompt, 50).tokens
    first = engine.stream(prompt, 50)
    next(first)
    with pytest.raises(ConfigurationError, match=r"device_blocks: 64 .* 74 or more"):
        next(engine.stream(prompt[::-1], 50))
    assert first.finish().tokens == expected
    assert len(engine.stream(prompt[::-1], 50).finish().tokens) == 50


def test_flush_and_forget_device_do_not_wait_for_an_open_stream(
    engine: Engine,
    prompt: list[int],
) -> None:
    expected = engine.generate(prompt, 8).tokens
    stream = engine.stream(prompt, 8)
    ids = [next(stream).id]
    assert engine.flush(20)
    engine.forget_device()
    ids += [token.id for token in stream]
    assert ids == expected


def test_close_engine_ends_open_stream(engine: Engine, prompt: list[int]) -> None:
    stream = engine.stream(prompt, 8)
    next(stream)
    engine.close(20)
    with pytest.raises(EngineClosedError):
        next(stream)
    assert list(stream) == []


def test_close_engine_with_open_stream_stores_its_context(
    model: LlamaForCausalLM,
    tmp_path: Path,
    prompt: list[int],
) -> None:
    first = Engine.open(model, tmp_path / "kv", cpu_bytes="8MiB", host="thread")
    stream = first.stream(prompt, 8)
    next(stream)
    first.close()
    with Engine.open(model, tmp_path / "kv", cpu_bytes="8MiB", host="thread") as second:
        assert second.generate(prompt, 1).stats.restored_tokens == 96


def test_stream_model_error_ends_it(
    engine: Engine,
    prompt: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = engine.stream(prompt, 8)
    next(stream)

    def fail(**_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", fail)
        with pytest.raises(ZeroDivisionError):
            next(stream)
    assert list(stream) == []
    assert engine.flush(20)


def test_repr_shows_id_tokens_and_end(engine: Engine, prompt: list[int]) -> None:
    stream = engine.stream(prompt, 2)
    short = stream.req_id[:8]
    assert repr(stream) == f"<TokenStream {short}: not begun>"
    next(stream)
    assert repr(stream) == f"<TokenStream {short}: 1 tokens>"
    result = stream.finish()
    assert repr(stream) == f"<TokenStream {short}: 2 tokens, ended>"
    assert repr(result).startswith(
        f"<GenerateResult {short}: 2 tokens; 0 of 100 prompt tokens restored, first"
    )
    assert repr(engine).startswith("<Engine LlamaForCausalLM, lmdb:///")
    assert repr(engine).endswith("/kv, open>")
    engine.close()
    assert repr(engine).endswith("/kv, closed>")
