"""Batches of copies: adjacent copies are merged; all copiers move the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from persistkv.cpu.devices.cuda import (
    CopyBatch,
    DriverBatchCopier,
    PageCopier,
    TorchCopier,
    choose_copier,
)

cuda = pytest.mark.cuda
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device"
)


def make_batch(
    target: torch.Tensor,
    source: torch.Tensor,
    pairs: list[tuple[int, int]],
    page: int,
) -> CopyBatch:
    """Return a batch of copies of ``page`` bytes; each pair is (target row, source row)."""
    targets = np.array([target.data_ptr() + to * target.stride(0) for to, _ in pairs])
    sources = np.array(
        [source.data_ptr() + start * source.stride(0) for _, start in pairs]
    )
    return CopyBatch.of_pages(targets, sources, page, target, source)


def test_batch_adjacent_copies_are_merged() -> None:
    target, source = (torch.zeros((10, 16), dtype=torch.int8) for _ in range(2))
    batch = make_batch(
        target, source, [(0, 5), (1, 6), (2, 7), (3, 9), (5, 3), (6, 4)], 16
    )
    assert batch.sizes.tolist() == [48, 16, 32]
    assert (batch.targets - target.data_ptr()).tolist() == [0, 48, 80]
    assert (batch.sources - source.data_ptr()).tolist() == [80, 144, 48]
    assert make_batch(target, source, [(0, 0), (1, 1)], 8).sizes.tolist() == [8, 8]


def run(copier: PageCopier, batch: CopyBatch, device: str) -> None:
    if device == "cpu":
        copier.copy(batch, None)  # type: ignore[arg-type]
        return
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        copier.copy(batch, stream)
        stream.synchronize()


def check(copier: PageCopier, device: str) -> None:
    rows = torch.randint(
        -128,
        128,
        (64, 300),
        dtype=torch.int8,
        generator=torch.Generator().manual_seed(0),
    )
    rows = (rows.pin_memory() if device == "cuda" else rows)[:, 20:276]
    order = np.random.default_rng(0).permutation(64).tolist()
    for page in (256, 100):
        pages = torch.zeros((64, 256), dtype=torch.int8, device=device)
        run(copier, make_batch(pages, rows, list(enumerate(order)), page), device)
        expected = torch.zeros((64, 256), dtype=torch.int8)
        expected[:, :page] = rows[order, :page]
        assert torch.equal(pages.cpu(), expected)
        back = torch.zeros((64, 256), dtype=torch.int8, pin_memory=device == "cuda")
        run(
            copier,
            make_batch(
                back, pages, [(start, to) for to, start in enumerate(order)], page
            ),
            device,
        )
        assert torch.equal(back[:, :page], rows[:, :page])
        assert not back[:, page:].any()


def test_torch_copier_cpu_moves_pages_both_ways() -> None:
    check(TorchCopier(), "cpu")


@cuda
@needs_cuda
def test_torch_copier_cuda_moves_pages_both_ways() -> None:
    check(TorchCopier(), "cuda")


@cuda
@needs_cuda
def test_batch_copier_cuda_moves_pages_both_ways() -> None:
    copier = choose_copier(torch.device("cuda", 0), pinned=True)
    if isinstance(copier, TorchCopier):
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    check(copier, "cuda")


@cuda
@needs_cuda
def test_batch_copier_default_stream_raises() -> None:
    copier = choose_copier(torch.device("cuda", 0), pinned=True)
    if not isinstance(copier, DriverBatchCopier):
        pytest.skip("the driver has no cuMemcpyBatchAsync")
    pages = torch.zeros((1, 64), dtype=torch.int8, device="cuda")
    rows = torch.zeros((1, 64), dtype=torch.int8).pin_memory()
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync failed with error"):
        # The driver rejects the default stream.
        copier.copy(make_batch(pages, rows, [(0, 0)], 64), torch.cuda.default_stream())


@cuda
@needs_cuda
def test_choose_copier_unpinned_memory_returns_torch_copier() -> None:
    assert isinstance(choose_copier(torch.device("cuda", 0), pinned=False), TorchCopier)
