"""Results and statistics of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the demo's command reads ``RequestStats`` without torch
    import torch

    from persistkv.connector.common import ConnectorStats
    from persistkv.storage.host.client import StoreStats


@dataclass
class RequestStats:
    """Sources of one request's prompt tokens, and its times."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    """Restored from pages that earlier requests left on the device."""
    cpu_tokens: int = 0
    """Restored from the primary tier, which had them ready."""
    persistent_tokens: int = 0
    """Restored from a secondary tier."""
    computed_tokens: int = 0
    """Prompt tokens that the model computed; at least one."""
    bytes_loaded: int = 0
    """Bytes copied from the primary tier to the device."""
    lookup_s: float = 0.0
    """Seconds until the restorable prefix was known, including promotions."""
    load_s: float = 0.0
    """Seconds of the load onto the device."""
    ttft_s: float = 0.0
    """Seconds from the call to the first token: lookup, promotion, load and prefill."""
    total_s: float = 0.0
    """Seconds from the call to the last token."""

    @property
    def restored_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.device_tokens + self.cpu_tokens + self.persistent_tokens


@dataclass(frozen=True)
class GenerateResult:
    """Result of one request."""

    req_id: str
    """Id of the request, also in ``persistkv ls``."""
    tokens: Sequence[int]
    """The generated tokens."""
    logits: torch.Tensor = field(repr=False)
    """Logits from which the first generated token was chosen: shape (vocabulary,), on the CPU."""
    block_hashes: Sequence[bytes] = field(repr=False)
    """Hashes of the context's full blocks whose KV was computed, in order."""
    stats: RequestStats


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine was opened."""

    requests: int
    device_blocks: int
    """Blocks of the device cache, of all KV cache groups."""
    resident_blocks: int
    """Device blocks that hold reusable KV."""
    cpu_blocks: int
    """Rows of the primary tier."""
    block_bytes: int
    """Bytes of one block of each KV cache group together."""
    connector: ConnectorStats
    persistent: tuple[StoreStats, ...]
    """Totals of both sides of each store, in the order of the stores' URLs."""
