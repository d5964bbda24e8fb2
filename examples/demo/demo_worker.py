"""The demo's model and its two processes: ``python -m examples.demo.demo_worker TASK``."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec
import torch
import transformers
import xxhash

from examples.demo.demo import FIRST, Answer, Report, Task, build_prompts
from persistkv.errors import PersistKVError
from persistkv.integrations.transformers.engine import Engine
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.integrations.transformers.kv_cache import RequestCache
from persistkv.integrations.transformers.results import GenerateResult

_SEED = 20_240_229
_NEW_TOKENS = 16
_BLOCK_SIZE = 16
_CPU_BYTES = "256MiB"
_PERSIST_S = 120.0
_WARM_UP_TOKENS = 1024


def make_checkpoint(directory: Path) -> None:
    """Write a small Llama with random weights of a fixed seed. Atomic: other processes see all of
    it or none.

    :raises OSError: the directory exists and is not empty, or cannot be written.
    """
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1 << 16,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=directory.parent) as parent,
        torch.random.fork_rng(),
    ):
        torch.manual_seed(_SEED)
        transformers.LlamaForCausalLM(config).float().save_pretrained(
            Path(parent) / "model", safe_serialization=True
        )
        os.replace(Path(parent) / "model", directory)


def main() -> None:
    """Run the task and write a report. Then the first process waits to be killed; the second one
    exits.

    If the task fails, write a report with the reason in ``error``, and exit.
    """
    task = msgspec.json.decode(sys.argv[1], type=Task)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    blocks = 2 * task.tokens // _BLOCK_SIZE + 64
    try:
        _log("opening the model and the store")
        with Engine.open(
            task.model,
            task.url,
            block_size=_BLOCK_SIZE,
            device_blocks=blocks,
            cpu_bytes=_CPU_BYTES,
            codec=task.codec,
        ) as engine:
            _warm_up(engine, task.tokens)
            _send(
                _answer_cold(engine, task)
                if task.is_cold
                else _answer_warm(engine, task)
            )
            while task.is_cold:
                time.sleep(60.0)
    except PersistKVError as error:
        _send(Report(error=str(error)))


def _send(report: Report) -> None:
    sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
    sys.stdout.flush()


def _log(text: str) -> None:
    sys.stderr.write(f"  {text}\n")


def _warm_up(engine: Engine, num_tokens: int) -> None:
    """Run the model to warm up threads, kernels and the allocator. The engine's own KV cache is not
    used."""
    _log("warming up the model")
    cache = RequestCache(engine.geometry, num_tokens + _WARM_UP_TOKENS)
    for buffer in cache.buffers:
        buffer.zero_()
    forward = ModelForward(engine.model)
    with torch.no_grad():
        for restored, length in (
            (0, _WARM_UP_TOKENS),
            (num_tokens, _BLOCK_SIZE),
            (num_tokens, 1),
        ):
            cache.set_length(restored)
            forward(torch.zeros((1, length), dtype=torch.long), cache)


def _answer_cold(engine: Engine, task: Task) -> Report:
    """Answer the questions ``FIRST`` with prompts computed in full. Then answer all questions with
    the KV that this left on the device. Return after the contexts of ``FIRST`` are durable.
    """
    prompts = build_prompts(task.tokens)
    results, since_start = _generate(
        engine, task, {question: prompts[question] for question in FIRST}, load=False
    )
    _log("the same questions, with KV on the device")
    resident = {
        question: engine.generate(token_ids, _NEW_TOKENS, store=False)
        for question, token_ids in prompts.items()
    }
    _log("waiting until everything is durable")
    if not all(
        engine.wait_persisted(result, _PERSIST_S) for result in results.values()
    ):
        raise PersistKVError(
            f"the contexts did not become durable in {_PERSIST_S:.0f} s"
        )
    pages = _page_digests(engine, engine.resident_pages())
    return Report(_answers(results), _answers(resident), pages, since_start)


def _answer_warm(engine: Engine, task: Task) -> Report:
    results, since_start = _generate(
        engine, task, build_prompts(task.tokens), load=True
    )
    restored = {
        block_hash
        for result in results.values()
        for block_hash in result.block_hashes[
            : result.stats.restored_tokens // _BLOCK_SIZE
        ]
    }
    return Report(
        _answers(results),
        pages=_page_digests(engine, restored),
        start_to_first_token_s=since_start,
        notices=list(engine.notices),
    )


def _generate(
    engine: Engine,
    task: Task,
    prompts: dict[str, list[int]],
    *,
    load: bool,
) -> tuple[dict[str, GenerateResult], float]:
    """Answer the prompts. Return the results by question, and seconds from the process's start to
    its first token.

    :param load: False computes the prompts in full and restores no KV.
    """
    results: dict[str, GenerateResult] = {}
    since_start = 0.0
    for question, token_ids in prompts.items():
        _log(question)
        begin = time.monotonic()
        result = engine.generate(
            token_ids, _NEW_TOKENS, load=load, labels={"question": question}
        )
        results[question] = result
        since_start = since_start or begin + result.stats.ttft_s - task.started
    return results, since_start


def _page_digests(engine: Engine, hashes: Iterable[bytes]) -> dict[str, str]:
    pages = engine.resident_pages()
    return {
        block_hash.hex(): xxhash.xxh3_128_hexdigest(_raw(pages[block_hash]))
        for block_hash in hashes
    }


def _answers(results: dict[str, GenerateResult]) -> list[Answer]:
    return [
        Answer(
            question,
            list(result.tokens),
            result.logits.tolist(),
            xxhash.xxh3_128_hexdigest(_raw(result.logits)),
            result.stats,
        )
        for question, result in results.items()
    ]


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


if __name__ == "__main__":
    main()
