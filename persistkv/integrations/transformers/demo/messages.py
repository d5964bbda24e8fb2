"""Messages between the demo's processes: the task as an argument, then one JSON line per event."""

from __future__ import annotations

import msgspec


class Task(msgspec.Struct, frozen=True):
    """Task of a process."""

    role: str
    """``cold``: the first process, which is killed; ``warm``: the second process."""
    url: str
    model: str
    tokens: int
    codec: str
    started: float
    """Monotonic seconds at which it was started."""


class Answer(msgspec.Struct, frozen=True):
    """One answered prompt."""

    question: str
    tokens: list[int]
    logits_digest: str
    """SHA-256 of the logits from which the first token was chosen."""
    logits: list[float]
    prompt_tokens: int
    device_tokens: int
    cpu_tokens: int
    persistent_tokens: int
    computed_tokens: int
    bytes_loaded: int
    lookup_s: float
    load_s: float
    ttft_s: float

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.cpu_tokens + self.persistent_tokens


class Progress(msgspec.Struct, frozen=True, tag="progress"):
    """A line of progress for the user."""

    text: str


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    """The process failed."""

    text: str


class ColdReport(msgspec.Struct, frozen=True, tag="cold"):
    """Results of the first process, which then waits to be killed."""

    cold: list[Answer]
    """Computed in full."""
    resident: list[Answer]
    """The same prompts, and the further ones, answered with the KV that the first run left on the device."""
    pages: dict[str, str]
    """Digest of each resident page by block hash, both hexadecimal."""
    start_to_first_token_s: float


class WarmReport(msgspec.Struct, frozen=True, tag="warm"):
    """Results of the second process."""

    answers: list[Answer]
    pages: dict[str, str]
    """Of the pages that were restored."""
    start_to_first_token_s: float
    notices: list[str]


Message = Progress | Failure | ColdReport | WarmReport
