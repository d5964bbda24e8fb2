"""Results and statistics of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # the demo's command reads ``RequestStats`` without torch
    import torch

    from persistkv.connector.common import ConnectorStats
    from persistkv.storage.host.client import StoreStats

_SHOWN_TEXT = 60  # characters of an answer in its repr
_SHOWN_ID = 8  # characters of an id, as in ``persistkv ls``


@dataclass
class RequestStats:
    """Statistics of one request: prompt tokens by source, and times."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    """Prompt tokens restored from pages that earlier requests left on the device."""
    cpu_tokens: int = 0
    """Prompt tokens restored from the primary tier without a promotion."""
    persistent_tokens: int = 0
    """Prompt tokens restored from a secondary tier, by promotion to the primary tier."""
    computed_tokens: int = 0
    """Prompt tokens that the model computed; at least one."""
    bytes_loaded: int = 0
    """Bytes copied from the primary tier to the device for this request."""
    load_reason: str | None = None
    """Use of the blocks that a store held for this request: they were ``loaded``, or the model
    computed their tokens because the store was ``too_slow``, the prefix ``too_short``, or the load
    had passed its ``deadline``. None: no store held blocks of the request, or the primary tier held
    them, too."""
    lookup_s: float = 0.0
    """Seconds from the call until the restorable prefix was known, including the wait for
    promotions."""
    load_s: float = 0.0
    """Seconds of the load from the primary tier to the device."""
    prefill_s: float = 0.0
    """Seconds in which the model computed ``computed_tokens`` and the first token."""
    saved_s: float | None = None
    """Seconds that a prefill of ``persistent_tokens`` would have taken, from the measured speed of
    this model's prefills; None: no prefill of 64 tokens or more was measured yet."""
    ttft_s: float = 0.0
    """Seconds from the call to the first token: lookup, promotion, load and prefill. For a stream,
    the time begins when its first token is asked for."""
    total_s: float = 0.0
    """Seconds from the call to the last token, counted as for ``ttft_s``."""

    @property
    def restored_tokens(self) -> int:
        """Number of prompt tokens whose KV was restored instead of computed."""
        return self.device_tokens + self.cpu_tokens + self.persistent_tokens


class Token(NamedTuple):
    """One token of a ``TokenStream``."""

    id: int
    text: str
    """The text that became complete with this token: "" within a character of several tokens, for
    special tokens, and without a tokenizer."""


@dataclass(frozen=True, repr=False)
class GenerateResult:
    """Result of one call of ``Engine.generate``, or of a ``TokenStream``."""

    req_id: str
    """Id of the request; ``persistkv ls`` lists its context under this id."""
    tokens: Sequence[int]
    """Ids of the generated tokens; a stop token that ended the generation is included."""
    text: str | None
    """Text of the generated tokens, without special tokens; None if the engine has no tokenizer."""
    logits: torch.Tensor
    """Logits from which the first generated token was chosen: shape (vocabulary,), on the CPU."""
    block_hashes: Sequence[bytes]
    """Hashes of the full blocks of prompt and answer whose KV was restored or computed, in
    order."""
    stats: RequestStats

    def __repr__(self) -> str:
        answer = f"{len(self.tokens)} tokens"
        if self.text is not None:
            answer += f" {shorten(repr(self.text), _SHOWN_TEXT, placeholder=' …')}"
        stats = self.stats
        return (
            f"<GenerateResult {self.req_id[:_SHOWN_ID]}: {answer}; {stats.restored_tokens} of "
            f"{stats.prompt_tokens} prompt tokens restored, first token after "
            f"{stats.ttft_s:.3f} s>"
        )


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was opened, and the numbers of blocks that it has now."""

    requests: int
    device_blocks: int
    """Number of blocks of the device cache, summed over all KV cache groups."""
    resident_blocks: int
    """Number of device blocks whose KV later requests can reuse, summed over all KV cache
    groups."""
    cpu_blocks: int
    """Number of rows of the primary tier; a row holds one block."""
    block_bytes: int
    """Sum over all KV cache groups of the bytes of one block."""
    connector: ConnectorStats
    load_reasons: dict[str, int]
    """Number of requests, and for several stores of their parts, by ``RequestStats.load_reason``.
    """
    persistent: tuple[StoreStats, ...]
    """For each store, in the order of the URLs: totals of its client in the engine, and of its
    host."""
