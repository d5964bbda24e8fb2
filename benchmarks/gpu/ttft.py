"""Time to first token of a Llama with 8 billion parameters: computed, and restored from LMDB.

One engine computes new prompts and answers each again from the KV that is resident on the device.
When all stores are durable, it closes, and a second engine with empty caches answers the same
prompts from the store. Tokens and logits of the two answers that reuse KV must be equal: both
compute the same last tokens on the same bytes. Each prompt is answered twice from resident KV
(``equal_repeats``): if these two answers differ, the model's kernels are not deterministic, and the
tokens of the restored answer may differ, too.

``restore_gb_s`` is the throughput from disk to device. ``target_needs_gb_s`` is the throughput at
which the warm time would be a tenth of the cold time, if all other steps took as long as with
resident KV.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.llama import KV_TOKEN_BYTES, make_llama, weights_hashed_once
from benchmarks.gpu.results import Results, parse
from persistkv import Engine
from persistkv.integrations.transformers.results import GenerateResult

TARGETS = {16_384: 0.1}  # of the cold time to first token

_NEW_TOKENS = 8
_BLOCK_TOKENS = 16
_LONG = 16_384
_SPARE_BYTES = 1 << 30  # bytes of rows beyond the longest prompt


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(
        __doc__.splitlines()[0],
        argv,
        lambda parser: parser.add_argument(
            "--tokens", type=int, nargs="+", default=[4096, 16_384, 65_536]
        ),
    )
    smoke = arguments.smoke
    results = Results("time to first token", arguments)
    lengths = [96, 160] if smoke else arguments.tokens
    free = os.statvfs("/dev/shm")
    fitting = [
        length
        for length in lengths
        if _rows_bytes(length, smoke) <= free.f_bavail * free.f_frsize
    ]
    for length in set(lengths) - set(fitting):
        results.add(
            f"{length} tokens",
            skipped=f"needs {_rows_bytes(length, smoke) >> 20} MiB of shared memory",
        )
    model = make_llama(arguments.device, smoke)
    with (
        tempfile.TemporaryDirectory(dir=arguments.directory) as directory,
        weights_hashed_once(),
    ):
        # Long prompts run last, with a store of their own: a time limit may end the run before it
        # allocates their rows.
        for part in (
            [length for length in fitting if length <= _LONG],
            [length for length in fitting if length > _LONG],
        ):
            if part:
                measure(model, part, f"{directory}/store-{part[-1]}", smoke, results)


def measure(
    model: Any,
    lengths: list[int],
    path: str,
    smoke: bool,
    results: Results,
) -> None:
    """Measure several prompt lengths with one store."""
    options: dict[str, Any] = {
        "device_blocks": max(lengths) // _BLOCK_TOKENS + 64,
        "cpu_bytes": _rows_bytes(max(lengths), smoke),
        "block_size": _BLOCK_TOKENS,
        "lookup_deadline_s": 60.0,
    }
    url = f"lmdb://{path}?capacity=48GiB"
    draw = np.random.default_rng(len(lengths))
    prompts = [
        (length, _prompt(draw, model, length))
        for length in lengths
        for _ in range(_rounds(length, smoke))
    ]
    cold, resident, repeats = [], [], []
    with Engine.open(model, url, **options) as engine:
        for length in lengths:
            # warms up kernels and allocator
            engine.generate(_prompt(draw, model, length), 2, load=False, store=False)
        for _, prompt in prompts:
            cold.append(engine.generate(prompt, _NEW_TOKENS, load=False))
            resident.append(engine.generate(prompt, _NEW_TOKENS, store=False))
            repeats.append(engine.generate(prompt, _NEW_TOKENS, store=False))
            if not engine.wait_persisted(cold[-1], 120.0):
                raise RuntimeError("a context did not become durable")
    warm: list[GenerateResult] = []
    with Engine.open(model, url, **options) as engine:
        for number, (length, prompt) in enumerate(prompts):
            warm.append(engine.generate(prompt, _NEW_TOKENS))
            if number + 1 == len(prompts) or prompts[number + 1][0] != length:
                chosen = [
                    index
                    for index, (other, _) in enumerate(prompts[: number + 1])
                    if other == length
                ]
                report(
                    length,
                    [cold[n] for n in chosen],
                    [resident[n] for n in chosen],
                    [repeats[n] for n in chosen],
                    [warm[n] for n in chosen],
                    results,
                )


def report(
    length: int,
    cold: list[GenerateResult],
    resident: list[GenerateResult],
    repeats: list[GenerateResult],
    warm: list[GenerateResult],
    results: Results,
) -> None:
    """Record one length, in medians over its prompts."""
    cold_s, resident_s, warm_s = (
        statistics.median(result.stats.ttft_s for result in answers)
        for answers in (cold, resident, warm)
    )
    restore_s = [result.stats.lookup_s + result.stats.load_s for result in warm]
    pairs = list(zip(resident, warm, strict=True))
    num_bytes = warm[0].stats.bytes_loaded
    left_s = cold_s / 10 - resident_s
    results.add(
        f"{length} tokens",
        warm_s / cold_s,
        at_most=TARGETS.get(length),
        cold_ms=cold_s * 1e3,
        resident_ms=resident_s * 1e3,
        warm_ms=warm_s * 1e3,
        lookup_and_promotion_ms=statistics.median(
            result.stats.lookup_s for result in warm
        )
        * 1e3,
        load_ms=statistics.median(result.stats.load_s for result in warm) * 1e3,
        kv_mib=num_bytes >> 20,
        restore_gb_s=num_bytes / statistics.median(restore_s) / 1e9,
        target_needs_gb_s=num_bytes / left_s / 1e9 if left_s > 0 else None,
        restored_tokens=[result.stats.persistent_tokens for result in warm],
        equal_tokens=sum(
            list(first.tokens) == list(second.tokens) for first, second in pairs
        ),
        equal_repeats=sum(
            list(first.tokens) == list(second.tokens)
            for first, second in zip(resident, repeats, strict=True)
        ),
        equal_logits=sum(
            torch.equal(first.logits, second.logits) for first, second in pairs
        ),
        max_logit_difference=max(
            float((first.logits - second.logits).abs().max()) for first, second in pairs
        ),
        prompts=len(warm),
    )


def _prompt(draw: np.random.Generator, model: Any, length: int) -> list[int]:
    prompt: list[int] = draw.integers(0, model.config.vocab_size, length).tolist()
    return prompt


def _rounds(length: int, smoke: bool) -> int:
    return 1 if smoke or length > _LONG else 3


def _rows_bytes(length: int, smoke: bool) -> int:
    return 64 << 20 if smoke else length * KV_TOKEN_BYTES + _SPARE_BYTES


if __name__ == "__main__":
    main()
