"""What the engine answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from persistkv.connector.common import ConnectorStats
from persistkv.storage.host.client import StoreStats


@dataclass
class RequestStats:
    """Where one request's prompt came from, and how long it took."""

    prompt_tokens: int = 0
    device_tokens: int = 0
    """Restored from pages that earlier requests left on the device."""
    cpu_tokens: int = 0
    """Restored from the primary tier, which had them ready."""
    persistent_tokens: int = 0
    """Restored from a tier behind the primary one."""
    computed_tokens: int = 0
    """Prompt tokens that the model computed; at least one."""
    bytes_loaded: int = 0
    """Bytes copied from the primary tier to the device."""
    lookup_s: float = 0.0
    """Seconds until it was known what can be restored, promotion included."""
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
    """One answer."""

    req_id: str
    tokens: Sequence[int]
    """The generated tokens."""
    logits: torch.Tensor = field(repr=False)
    """Logits that the first generated token was chosen from: shape (vocabulary,), on the CPU."""
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
    """What both sides of each store count, in the order that the stores were given in."""
