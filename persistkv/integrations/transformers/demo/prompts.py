"""Prompts of real text: modules of the standard library as the context of a code assistant. One byte is one token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from persistkv.errors import ConfigurationError

MIN_TOKENS = 256
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
_QUESTION_TOKENS = 64
_FIRST = (
    "How does heapq keep its invariant when an item is pushed?",
    "Which exception does textwrap raise for a bad width?",
    "Why does bisect_right differ from bisect_left?",
)
_FURTHER = (
    "Show how wrap() treats words longer than the line.",
    "What does merge() cost for k inputs of n items?",
)


@dataclass(frozen=True)
class Prompt:
    """The shared context followed by one question."""

    question: str
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Prompts:
    """The prompts of both processes."""

    shared_tokens: int
    """Tokens of the context at the start of all prompts."""
    first: Sequence[Prompt]
    """Answered by both processes."""
    further: Sequence[Prompt]
    """Not stored by the first process; answered by the second process."""


def build_prompts(num_tokens: int) -> Prompts:
    """Return prompts that share their first ``num_tokens`` tokens.

    :raises ConfigurationError: if there is no text of that length.
    """
    text = _library_text()
    if not MIN_TOKENS <= num_tokens <= len(text):
        raise ConfigurationError("tokens", num_tokens, f"{MIN_TOKENS} to {len(text)}")
    context = text[:num_tokens]
    first = [_prompt(context, question) for question in _FIRST]
    return Prompts(num_tokens, first, [_prompt(context, question) for question in _FURTHER])


def _prompt(context: bytes, question: str) -> Prompt:
    asked = f"\n# {question}\n".encode().ljust(_QUESTION_TOKENS, b"#")
    return Prompt(question, list(context + asked[:_QUESTION_TOKENS]))


def _library_text() -> bytes:
    parts = []
    for name in _MODULES:
        spec = find_spec(name)
        if spec is not None and spec.origin is not None:
            parts.append(f"# {name}.py\n".encode() + Path(spec.origin).read_bytes())
    return b"\n".join(parts)
