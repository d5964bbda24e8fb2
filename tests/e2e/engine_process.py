"""One engine in its own process: ``engine_process.py CHECKPOINT URLS MODE``. It prints one JSON
line.

URLs are separated by spaces, the nearest tier first.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import transformers

from persistkv import Engine

PROMPT = [(5 * index * index + index) % 256 for index in range(700)]


class Report(msgspec.Struct):
    """What an engine restored, answered and holds."""

    restored: int
    """Tokens from stores."""
    durable: bool
    """Whether the context is in all stores, as far as the engine knows."""
    tokens: list[int]
    logits: str
    """Digest of the logits."""
    pages: list[dict[str, str]]
    """For each KV cache group, the digests of its pages, by block."""


def main(checkpoint: str, urls: str, mode: str) -> None:
    transformers.utils.logging.disable_progress_bar()
    with open_engine(checkpoint, urls.split()) as engine:
        sys.stdout.write(msgspec.json.encode(run(engine, mode)).decode() + "\n")
        sys.stdout.flush()
        if mode != "warm":
            time.sleep(600.0)


def open_engine(checkpoint: str | Path, urls: Sequence[str]) -> Engine:
    return Engine.open(checkpoint, urls, device_blocks=128, cpu_bytes="16MiB")


def run(engine: Engine, mode: str) -> Report:
    """Run the prompt; return what the engine restored, answered and holds.

    :param mode: ``warm``: load from the stores. ``cold``, ``unwaited``: compute the prompt, and run
        it once more from the device; ``cold`` waits until it is durable.
    """
    result = engine.generate(PROMPT, 12, load=mode == "warm")
    restored = result.stats.persistent_tokens
    is_durable = False
    if mode != "warm":
        is_durable = mode == "unwaited" or engine.wait_persisted(result)
        result = engine.generate(PROMPT, 12, store=False)
    prompt_hashes = result.block_hashes[: len(PROMPT) // 16]
    return Report(
        restored=restored,
        durable=is_durable,
        tokens=list(result.tokens),
        logits=hashlib.sha256(result.logits.numpy().data).hexdigest(),
        pages=[
            page_digests(engine, group, prompt_hashes)
            for group in range(len(engine.geometry))
        ],
    )


def page_digests(
    engine: Engine,
    group: int,
    block_hashes: Sequence[bytes],
) -> dict[str, str]:
    """Return digests of the group's resident pages. With a sliding window, these are the pages
    inside the window."""
    pages = engine.resident_pages(group)
    return {
        name.hex(): hashlib.sha256(pages[name].numpy().data).hexdigest()
        for name in block_hashes
        if name in pages
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
