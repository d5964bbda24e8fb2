"""Prompts and messages of the demo's processes. Importing this module imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import msgspec

from persistkv.errors import ConfigurationError
from persistkv.integrations.transformers.results import RequestStats

FIRST = (
    "How does heapq keep its invariant when an item is pushed?",
    "Which exception does textwrap raise for a bad width?",
    "Why does bisect_right differ from bisect_left?",
)
"""Questions that both processes answer."""
FURTHER = (
    "Show how wrap() treats words longer than the line.",
    "What does merge() cost for k inputs of n items?",
)
"""Questions that the first process answers without storing their contexts; the second process answers them, too."""

_MODULES = (
    "textwrap",
    "heapq",
    "bisect",
    "queue",
    "shlex",
    "fnmatch",
    "csv",
    "sched",
    "string",
    "calendar",
    "argparse",
)
_MIN_TOKENS = 256
_QUESTION_TOKENS = 64


def build_prompts(num_tokens: int) -> dict[str, list[int]]:
    """Return the tokens of each question's prompt: modules of the standard library, then the question.

    One byte is one token. All prompts share their first ``num_tokens`` tokens.

    :raises ConfigurationError: if ``num_tokens`` is below 256, or exceeds the length of the modules' text.
    """
    specs = [spec for spec in map(find_spec, _MODULES) if spec is not None and spec.origin is not None]
    text = b"\n".join(f"# {spec.name}.py\n".encode() + Path(str(spec.origin)).read_bytes() for spec in specs)
    if not _MIN_TOKENS <= num_tokens <= len(text):
        raise ConfigurationError("tokens", num_tokens, f"{_MIN_TOKENS} to {len(text)}")
    asked = {question: f"\n# {question}\n".encode().ljust(_QUESTION_TOKENS, b"#") for question in FIRST + FURTHER}
    return {question: list(text[:num_tokens] + tail[:_QUESTION_TOKENS]) for question, tail in asked.items()}


class Task(msgspec.Struct, frozen=True):
    """Task of a worker process, passed as JSON in its only command line argument.

    ``url`` is the store's, ``model`` a checkpoint's directory, ``tokens`` the number of tokens that all prompts share.
    """

    is_cold: bool
    """Whether this is the first process, which computes its answers in full, and is killed after its report."""
    url: str
    model: str
    tokens: int
    codec: str
    started: float
    """Start of the worker process: seconds of the monotonic clock, read by the process that starts it."""


class Answer(msgspec.Struct, frozen=True):
    """One answered prompt."""

    question: str
    """Text of the question, as in ``build_prompts``."""
    tokens: list[int]
    """Ids of the generated tokens."""
    logits: list[float]
    """Logits from which the first token was chosen."""
    logits_digest: str
    """xxh3-128 checksum of the bytes of the same logits, hexadecimal."""
    stats: RequestStats


class Report(msgspec.Struct, frozen=True):
    """Results of a worker process, written as one line of JSON on its standard output."""

    answers: list[Answer] = []
    """First process: answers to the questions ``FIRST``, computed in full. Second process: answers to all questions."""
    resident: list[Answer] = []
    """First process: answers to all questions, with the KV that computing ``answers`` left on the device."""
    pages: dict[str, str] = {}
    """Digests of device pages by block hash, both hexadecimal. First process: all published pages. Second process: the
    restored pages only."""
    start_to_first_token_s: float = 0.0
    """Seconds from the start of the process to the first token of its first answer."""
    notices: list[str] = []
    """Second process: ``Engine.notices``."""
    error: str = ""
    """Why the process failed; empty if it did not."""
