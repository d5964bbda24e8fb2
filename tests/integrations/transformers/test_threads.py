"""One engine called from several threads, as the pool of a web server does."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from persistkv import Engine, EngineClosedError

THREADS = 6
PROMPTS = [
    [(seed + 5 * index * index) % 256 for index in range(50)] for seed in range(24)
]


def test_generate_from_several_threads_returns_answers_of_one_thread(
    model: LlamaForCausalLM,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Engine.open(model, host="thread", cpu_bytes="8MiB") as engine:
        expected = [list(engine.generate(prompt, 6).tokens) for prompt in PROMPTS]
    with (
        Engine.open(
            model, tmp_path / "kv", device_blocks=24, cpu_bytes="1MiB"
        ) as engine,
        ThreadPoolExecutor(THREADS) as pool,
    ):

        def answer(index: int) -> list[int]:
            result = engine.generate(PROMPTS[index % len(PROMPTS)], 6)
            if index % 4 == 0:
                engine.wait_persisted(result)
                engine.stats()
            return list(result.tokens)

        answers = list(pool.map(answer, range(2 * len(PROMPTS))))
        assert engine.flush()
    assert answers == 2 * expected
    assert caplog.records == []


def test_close_while_threads_generate_ends_them_with_closed_error(
    model: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    engine = Engine.open(model, tmp_path / "kv", cpu_bytes="8MiB")
    started = threading.Barrier(THREADS + 1)
    outcomes: list[type[BaseException]] = []

    def work(number: int) -> None:
        started.wait()
        try:
            for prompt in PROMPTS * 100:
                engine.generate([*prompt, number], 2)
        except BaseException as error:
            outcomes.append(type(error))

    threads = [
        threading.Thread(target=work, args=(number,)) for number in range(THREADS)
    ]
    for thread in threads:
        thread.start()
    started.wait()
    engine.generate(PROMPTS[0], 2)
    engine.close()
    for thread in threads:
        thread.join(60)
    assert outcomes == [EngineClosedError] * THREADS


def test_wait_persisted_in_one_thread_lets_another_generate(
    model: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    with (
        Engine.open(model, tmp_path / "kv", cpu_bytes="8MiB") as engine,
        ThreadPoolExecutor(1) as pool,
    ):
        stream = engine.stream(PROMPTS[2], 4)
        next(stream)
        waiting = pool.submit(engine.wait_persisted, stream.req_id, 30.0)
        assert len(engine.generate(PROMPTS[0], 4).tokens) == 4
        assert engine.wait_persisted(engine.generate(PROMPTS[1], 4))
        assert not waiting.done(), "the wait goes on"
        stream.close()
        assert waiting.result(10)


def test_streams_of_several_threads_return_answers_of_one_thread(
    model: LlamaForCausalLM,
    tmp_path: Path,
) -> None:
    with Engine.open(model, host="thread", cpu_bytes="8MiB") as engine:
        expected = [list(engine.generate(prompt, 6).tokens) for prompt in PROMPTS]
    with (
        Engine.open(model, tmp_path / "kv", cpu_bytes="8MiB", host="thread") as engine,
        ThreadPoolExecutor(THREADS) as pool,
    ):

        def answer(index: int) -> list[int]:
            prompt = PROMPTS[index % len(PROMPTS)]
            if index % 5 == 0:  # abandoned
                next(engine.stream(prompt, 6))
            stream = engine.stream(prompt, 6)
            # each token by another thread, as web servers do
            tokens = [pool.submit(next, stream).result().id for _ in range(6)]
            assert list(stream) == []
            return tokens

        with ThreadPoolExecutor(THREADS) as askers:
            answers = list(askers.map(answer, range(2 * len(PROMPTS))))
        assert engine.flush()
        assert engine.stats().requests == 2 * len(PROMPTS) + 10
    assert answers == 2 * expected
