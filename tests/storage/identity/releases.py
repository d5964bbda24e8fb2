"""KV of a small Llama, as rows of engines of two releases, and stores that both releases use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import TypedDict, Unpack

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from persistkv.base import make_offload_key
from persistkv.config import GroupLayout, NumberLayout, RowLayout, VectorLayout
from persistkv.integrations.transformers.interface import ModelForward
from persistkv.memory.rows import Rows
from persistkv.storage.backend import Backend
from persistkv.storage.identity import Identity
from persistkv.storage.identity.canary import Canary
from persistkv.storage.records import RequestEnd, StoreOptions
from persistkv.storage.store.blocking import BlockingStore
from tests.storage.stores import StoreSettings

LAYERS, HEADS, TOKENS, SIZE = 4, 2, 16, 32
"""Layers and KV heads of the model, tokens per block, numbers per head."""
BLOCKS = 8  # of a context
VOCABULARY = 512
_NUM_ROWS = 64
THETA = 10_000.0
ITEMS = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}

KV = npt.NDArray[np.float32]
"""KV of a context: shape (layers, keys and values, heads, tokens, numbers)."""


def row_layout(dtype: str) -> RowLayout:
    """Return the layout of rows in which layers, keys and values, heads, tokens and numbers follow
    each other."""
    item = ITEMS[dtype]
    head = TOKENS * SIZE * item
    used = LAYERS * 2 * HEADS * head
    cells = ((LAYERS, 2 * HEADS * head), (2, HEADS * head), (HEADS, head))
    vectors = VectorLayout(0, cells, ((TOKENS, SIZE * item),), SIZE)
    numbers = NumberLayout(dtype, (vectors,))  # type: ignore[arg-type]
    return RowLayout(used, (GroupLayout(((0, used),)),), numbers)


def prompt(number: int, blocks: int = BLOCKS) -> list[int]:
    """Return the tokens of a context, different for each number."""
    return list(
        map(int, np.random.default_rng(number).integers(3, VOCABULARY, blocks * TOKENS))
    )


class ModelOptions(TypedDict, total=False):
    """Arguments of ``model``."""

    seed: int
    dtype: str
    theta: float
    deviation: float


@cache
def model(
    seed: int = 0,
    dtype: str = "float32",
    theta: float = THETA,
    deviation: float = 0.05,
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        head_dim=SIZE,
        max_position_embeddings=4096,
        initializer_range=deviation,
        rope_parameters={"rope_type": "default", "rope_theta": theta},
    )
    return LlamaForCausalLM(config).eval().to(getattr(torch, dtype))


def compute(
    tokens: Sequence[int],
    *,
    pieces: Sequence[int] = (),
    companions: Sequence[Sequence[int]] = (),
    **options: Unpack[ModelOptions],
) -> KV:
    """Return the KV that a model computes of a context.

    :param pieces: tokens per forward pass; the rest is computed in one.
    :param companions: contexts of the same length in the same batch.
    :param options: of ``model``.
    """
    batch = torch.tensor([tokens, *companions])
    forward = ModelForward(model(**options))
    cache, start = DynamicCache(), 0
    with torch.no_grad():
        for piece in (*pieces, len(tokens)):
            if start < len(tokens):
                forward(batch[:, start : start + piece], cache)
                start += piece
    return (
        torch.stack(
            [torch.stack([layer.keys[0], layer.values[0]]) for layer in cache.layers]
        )
        .float()
        .numpy()
    )


def to_blocks(kv: KV, dtype: str) -> npt.NDArray[np.uint8]:
    """Return the blocks of a context in numbers of ``dtype``: one row each, in the layout of
    ``row_layout``."""
    blocks = kv.shape[3] // TOKENS
    split = kv.reshape(LAYERS, 2, HEADS, blocks, TOKENS, SIZE).transpose(
        3, 0, 1, 2, 4, 5
    )
    numbers = torch.from_numpy(np.ascontiguousarray(split)).to(getattr(torch, dtype))
    return numbers.view(torch.uint8).numpy().reshape(blocks, -1)


def keys_of(tokens: Sequence[int]) -> list[bytes]:
    """Return the keys of a context's blocks; equal prefixes have equal keys."""
    ends = range(TOKENS, len(tokens) + 1, TOKENS)
    return [
        bytes(
            make_offload_key(Identity.of({"tokens": list(tokens[:end])}).digest * 2, 0)
        )
        for end in ends
    ]


def identity(release: str, **fields: object) -> Identity:
    return Identity.of(
        {"engine": {"name": "vllm", "release": release}, "weights": "w"} | fields
    )


class Release:
    """Engine of one release with a store of its own on a shared backend. Close it with ``end``."""

    def __init__(
        self,
        backend: Backend,
        release: str,
        dtype: str = "float32",
        *,
        fields: Mapping[str, object] | None = None,
        described: bool = True,
        **options: Unpack[StoreSettings],
    ) -> None:
        """
        :param fields: further fields of the identity.
        :param described: whether the engine describes the numbers in its rows.
        :param options: of the store.
        """
        layout = row_layout(dtype)
        if not described:
            layout = RowLayout(layout.row_stride, layout.groups)
        self.dtype = dtype
        self.rows = Rows(memoryview(bytearray(_NUM_ROWS * layout.row_stride)), layout)
        known = identity(release, **(fields or {}))
        self.store = BlockingStore(
            backend, known, self.rows, StoreOptions(**options), url="memory://test"
        )
        self._requests = 0

    @property
    def canary(self) -> Canary:
        """The store's sources of loads."""
        return self.store.store.sources

    @property
    def compares(self) -> bool:
        """Whether the store compares blocks, or serves those of another release."""
        return self.canary.active

    def run(self, tokens: Sequence[int], kv: KV, first: int = 0) -> None:
        """Store the blocks of a request that an engine has computed, from block ``first`` on, and
        end the request.

        Blocks before ``first`` are neither stored nor loaded.
        """
        blocks, keys = to_blocks(kv, self.dtype), keys_of(tokens)
        self._requests += 1
        request = f"{id(self)}-{self._requests}"
        # each step of an engine computes some of the blocks
        for start in range(first, len(keys), 4):
            numbers = range(start, min(start + 4, len(keys)))
            self.rows.array[list(numbers)] = blocks[start : numbers.stop]
            assert self.store.put(
                request, [keys[number] for number in numbers], numbers, numbers
            )
        self.store.end_request(
            RequestEnd(request, request, (keys,), len(tokens), TOKENS)
        )
        self.store.flush()

    def load(self, tokens: Sequence[int]) -> list[bool]:
        """Load a context's blocks into rows; return which of them a lookup finds and a read
        serves."""
        keys = keys_of(tokens)
        self.rows.array[: len(keys)] = 0
        failed = set(self.store.read(keys, range(len(keys))))
        found = [key not in failed for key in keys]
        assert found == [key in self.store.index for key in keys]
        return found

    def end(self) -> None:
        """Close the store, but not its backend."""
        self.store.flush()
        self.canary.close()
        self.store.index.close()
