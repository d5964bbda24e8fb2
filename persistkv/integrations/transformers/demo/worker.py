"""The two processes of the demo: ``python -m persistkv.integrations.transformers.demo.worker TASK``."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Iterable, Sequence

import msgspec
import torch
import transformers
import xxhash

from persistkv.errors import PersistKVError
from persistkv.integrations.transformers.demo.messages import (
    Answer,
    ColdReport,
    Failure,
    Message,
    Progress,
    Task,
    WarmReport,
)
from persistkv.integrations.transformers.demo.prompts import Prompt, build_prompts
from persistkv.integrations.transformers.engine import Engine
from persistkv.integrations.transformers.kv_cache import RequestCache
from persistkv.integrations.transformers.results import GenerateResult

NEW_TOKENS = 16
BLOCK_SIZE = 16
_CPU_BYTES = "256MiB"
_PERSIST_S = 120.0
_WARM_UP_TOKENS = 1024


def main() -> None:
    """Run the task. The cold process then waits to be killed; the warm one exits."""
    task = msgspec.json.decode(sys.argv[1], type=Task)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        with _open(task) as engine:
            _warm_up(engine, task.tokens)
            (_run_cold if task.role == "cold" else _run_warm)(engine, task)
    except PersistKVError as error:
        _tell(Failure(str(error)))
        sys.exit(2)


def _tell(message: Message) -> None:
    sys.stdout.write(msgspec.json.encode(message).decode() + "\n")
    sys.stdout.flush()


def _open(task: Task) -> Engine:
    _tell(Progress("opening the model and the store"))
    blocks = 2 * task.tokens // BLOCK_SIZE + 64
    return Engine.open(
        task.model, task.url, block_size=BLOCK_SIZE, device_blocks=blocks, cpu_bytes=_CPU_BYTES, codec=task.codec
    )


def _warm_up(engine: Engine, num_tokens: int) -> None:
    """Warm up threads, kernels and the allocator before the measurement. The engine's own cache is not used."""
    _tell(Progress("warming the model up"))
    cache = RequestCache(engine.geometry, num_tokens + _WARM_UP_TOKENS)
    for buffer in cache.buffers:
        buffer.zero_()
    with torch.no_grad():
        for restored, length in ((0, _WARM_UP_TOKENS), (num_tokens, BLOCK_SIZE), (num_tokens, 1)):
            cache.set_length(restored)
            engine.model(input_ids=torch.zeros((1, length), dtype=torch.long), past_key_values=cache, use_cache=True)


def _run_cold(engine: Engine, task: Task) -> None:
    """Compute all answers in full, then answer again on the resident cache, report when all is durable, and wait."""
    prompts = build_prompts(task.tokens)
    results: list[GenerateResult] = []
    since_start = 0.0
    for prompt in prompts.first:
        _tell(Progress(f"cold: {prompt.question}"))
        begin = time.monotonic()
        results.append(engine.generate(prompt.token_ids, NEW_TOKENS, reuse=False, labels={"question": prompt.question}))
        since_start = since_start or begin + results[0].stats.ttft_s - task.started
    _tell(Progress("the same on the resident cache"))
    everything = [*prompts.first, *prompts.further]
    resident = [engine.generate(prompt.token_ids, NEW_TOKENS, store=False) for prompt in everything]
    _tell(Progress("waiting until all is durable"))
    if not all(engine.wait_persisted(result, _PERSIST_S) for result in results):
        raise PersistKVError(f"the contexts did not become durable in {_PERSIST_S:.0f} s")
    _tell(
        ColdReport(
            _answers(prompts.first, results),
            _answers(everything, resident),
            _page_digests(engine, engine.resident_pages()),
            since_start,
        )
    )
    while True:
        time.sleep(60.0)


def _run_warm(engine: Engine, task: Task) -> None:
    prompts = build_prompts(task.tokens)
    everything = [*prompts.first, *prompts.further]
    results: list[GenerateResult] = []
    restored: dict[bytes, None] = {}
    since_start = 0.0
    for prompt in everything:
        _tell(Progress(f"warm: {prompt.question}"))
        begin = time.monotonic()
        result = engine.generate(prompt.token_ids, NEW_TOKENS, labels={"question": prompt.question})
        results.append(result)
        restored |= dict.fromkeys(result.block_hashes[: result.stats.restored_tokens // BLOCK_SIZE])
        since_start = since_start or begin + result.stats.ttft_s - task.started
    _tell(WarmReport(_answers(everything, results), _page_digests(engine, restored), since_start, list(engine.notices)))


def _page_digests(engine: Engine, hashes: Iterable[bytes]) -> dict[str, str]:
    pages = engine.resident_pages()
    return {block_hash.hex(): xxhash.xxh3_128_hexdigest(_raw(pages[block_hash])) for block_hash in hashes}


def _raw(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data


def _answers(prompts: Sequence[Prompt], results: Sequence[GenerateResult]) -> list[Answer]:
    return [_answer(prompt, result) for prompt, result in zip(prompts, results, strict=True)]


def _answer(prompt: Prompt, result: GenerateResult) -> Answer:
    stats = result.stats
    return Answer(
        prompt.question,
        list(result.tokens),
        hashlib.sha256(_raw(result.logits)).hexdigest(),
        result.logits.tolist(),
        stats.prompt_tokens,
        stats.device_tokens,
        stats.cpu_tokens,
        stats.persistent_tokens,
        stats.computed_tokens,
        stats.bytes_loaded,
        stats.lookup_s,
        stats.load_s,
        stats.ttft_s,
    )


if __name__ == "__main__":
    main()
