"""CPUCopyEngine: bytes, few calls regardless of the order of pages, and reported failures."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from persistkv.cpu.devices import cpu as module
from persistkv.cpu.devices.base import Direction
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.layout import KVMemory, PageCopies

PAGE, FACTOR = 48, 3
NUM_BLOCKS, NUM_ROWS = 200, 60


def make_memory() -> KVMemory:
    generator = torch.Generator().manual_seed(3)
    pages = torch.randint(
        -128, 128, (NUM_BLOCKS, PAGE), dtype=torch.int8, generator=generator
    )
    rows = torch.zeros((NUM_ROWS, 200), dtype=torch.int8)[:, 16 : 16 + FACTOR * PAGE]
    return KVMemory((pages,), (rows,), FACTOR)


def run(
    memory: KVMemory,
    direction: Direction,
    blocks: list[int],
    sub_blocks: list[int],
) -> None:
    engine = CPUCopyEngine(memory, direction)
    assert engine.submit(
        1, [PageCopies(0, PAGE, np.array(blocks), np.array(sub_blocks))]
    )
    engine.wait({1})
    assert [result.success for result in engine.get_finished()] == [True]
    engine.shutdown()


def arrangements() -> dict[str, tuple[list[int], list[int]]]:
    """Return (blocks, sub-blocks) for each code path of the engine."""
    chance = random.Random(5)
    shuffled = chance.sample(range(NUM_BLOCKS), 150)
    places = chance.sample(range(NUM_ROWS * FACTOR), 150)
    return {
        "both in order": (list(range(10, 160)), list(range(4, 154))),
        "rows in order": (shuffled, list(range(4, 154))),
        "rows backwards": (shuffled, list(range(160, 10, -1))),
        "within one row": (shuffled[:2], [7, 8]),
        "blocks in order": (list(range(20, 170)), places),
        "few runs on both sides": ([*range(50), *range(100, 150)], [*range(75, 175)]),
        "nothing in order": (shuffled, places),
    }


@pytest.mark.parametrize("buffer_bytes", [PAGE * 7, PAGE - 1, 8 << 20])
@pytest.mark.parametrize("name", arrangements())
def test_cpu_engine_any_page_order_copies_same_bytes(
    name: str,
    buffer_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(module, "FEW_RUNS", 3)
    blocks, sub_blocks = arrangements()[name]
    memory = make_memory()
    original = memory.pages[0].clone()
    run(memory, Direction.STORE, blocks, sub_blocks)
    places = memory.rows[0].reshape(-1, PAGE)
    expected = torch.zeros_like(places)
    expected[sub_blocks] = original[blocks]
    assert torch.equal(places, expected)
    memory.pages[0].zero_()
    run(memory, Direction.LOAD, blocks, sub_blocks)
    restored = torch.zeros_like(original)
    restored[blocks] = original[blocks]
    assert torch.equal(memory.pages[0], restored)


def test_submit_many_pages_makes_one_torch_call() -> None:
    """Each call releases the GIL and may wait long to acquire it again."""
    copies: list[str] = []

    class Recorded(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func._schema.is_mutable:
                copies.append(str(func))
            return func(*args, **(kwargs or {}))

    pages = torch.zeros((1000, 16), dtype=torch.int8)
    memory = KVMemory((pages,), (torch.zeros((1000, 16), dtype=torch.int8),), 1)
    blocks = np.array(random.Random(1).sample(range(1000), 1000))
    for direction in Direction:
        engine = CPUCopyEngine(memory, direction)
        for order in (blocks, np.arange(1000)):
            with Recorded():  # type: ignore[no-untyped-call]
                assert engine.copy_now(1, [PageCopies(0, 16, blocks, order)]).success
    assert copies == ["aten.index.Tensor_out"] * 2 + ["aten.index_put_.default"] * 2


def test_run_copies_on_thread_of_caller() -> None:
    memory = make_memory()
    engine = CPUCopyEngine(memory, Direction.STORE)
    threads = threading.active_count()
    result = engine.copy_now(
        7, [PageCopies(0, PAGE, np.array([4, 2]), np.array([0, 9]))]
    )
    assert (result.job_id, result.success, result.num_bytes) == (7, True, 2 * PAGE)
    assert torch.equal(
        memory.rows[0].reshape(-1, PAGE)[[0, 9]], memory.pages[0][[4, 2]]
    )
    assert threading.active_count() == threads


@pytest.mark.parametrize("page", [16, (8 << 15) - 8, 8 << 15])
def test_cpu_engine_any_page_size_copies_bytes(page: int) -> None:
    pages = torch.randint(
        -128,
        128,
        (5, page),
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(1),
    )
    memory = KVMemory((pages,), (torch.zeros((6, page), dtype=torch.int8),), 1)
    engine = CPUCopyEngine(memory, Direction.STORE)
    engine.submit(1, [PageCopies(0, page, np.array([4, 1, 3, 0, 2]), np.arange(1, 6))])
    engine.wait({1})
    assert [result.success for result in engine.get_finished()] == [True]
    assert torch.equal(memory.rows[0][1:], pages[[4, 1, 3, 0, 2]])
    engine.shutdown()


def test_submit_missing_block_fails_job_and_next_job_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory = make_memory()
    engine = CPUCopyEngine(memory, Direction.STORE)
    engine.submit(1, [PageCopies(0, PAGE, np.array([NUM_BLOCKS + 1]), np.array([0]))])
    engine.submit(2, [PageCopies(0, PAGE, np.array([1]), np.array([0]))])
    engine.wait({1, 2})
    assert [
        (result.job_id, result.success, result.num_bytes)
        for result in engine.get_finished()
    ] == [
        (1, False, 0),
        (2, True, PAGE),
    ]
    assert "store job 1 failed" in caplog.text
    engine.shutdown()


@pytest.mark.parametrize(
    ("page", "offset", "itemsize"),
    [(64, 0, 16), (64, 8, 8), (24, 0, 8), (20, 0, 4), (6, 0, 2), (7, 0, 1), (64, 1, 1)],
)
def test_widened_any_alignment_uses_widest_common_element(
    page: int,
    offset: int,
    itemsize: int,
) -> None:
    aligned = torch.zeros((4, page), dtype=torch.int8)
    shifted = torch.zeros((4, 128), dtype=torch.int8)[:, offset : offset + page]
    wide = module.widened(aligned, shifted)
    assert [tensor.element_size() for tensor in wide] == [itemsize] * 2
    assert [tensor.shape for tensor in wide] == [(4, page // itemsize)] * 2
