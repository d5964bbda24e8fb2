"""Pinning in ranges, and taking it back when CUDA refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from persistkv.cpu.shared_offload_region import SharedOffloadRegion

STRIDE, ROWS = 8192, 10


class Runtime:
    """A CUDA runtime that counts, and refuses from a given call on."""

    def __init__(self, refuse_from: int = 1000, code: int = 2) -> None:
        self.registered: dict[int, int] = {}
        self.calls = 0
        self.refuse_from = refuse_from
        self.code = code

    def cudaHostRegister(self, address: int, size: int, flags: int, /) -> int:
        self.calls += 1
        if self.calls >= self.refuse_from:
            return self.code
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int, /) -> int:
        return 0 if self.registered.pop(address, None) else 713


@pytest.fixture
def region(shared_memory: str) -> Iterator[SharedOffloadRegion]:
    region = SharedOffloadRegion("engine", STRIDE * ROWS, ROWS, 0, 1, STRIDE, directory=shared_memory)
    yield region
    region.cleanup()


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedOffloadRegion, "registration_bytes", 3 * STRIDE + 1)


def test_ranges_are_bounded_and_end_between_rows(region: SharedOffloadRegion) -> None:
    runtime = Runtime()
    assert region.pin(runtime)
    assert region.is_pinned
    offsets = {address - region.address: size for address, size in runtime.registered.items()}
    assert offsets == {0: 3 * STRIDE, 3 * STRIDE: 3 * STRIDE, 6 * STRIDE: 3 * STRIDE, 9 * STRIDE: STRIDE}
    assert region.pin(runtime)
    assert runtime.calls == 4


def test_a_refusal_is_rolled_back_with_one_warning(
    region: SharedOffloadRegion, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = Runtime(refuse_from=3)
    assert not region.pin(runtime)
    assert not region.is_pinned
    assert not runtime.registered
    (record,) = caplog.records
    assert "CUDA error 2" in record.getMessage()
    assert f"at offset {6 * STRIDE}" in record.getMessage()


def test_a_failed_release_is_logged(region: SharedOffloadRegion, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime()
    region.pin(runtime)
    runtime.registered.clear()
    region.cleanup()
    assert len(caplog.records) == 4
    assert "error 713" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_stays_unpinned(region: SharedOffloadRegion, caplog: pytest.LogCaptureFixture) -> None:
    assert not region.pin()
    assert not caplog.records


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_pinning(region: SharedOffloadRegion) -> None:
    assert region.pin()
    assert region.create_next_view(STRIDE).is_pinned()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_refusal_does_not_poison_cuda(region: SharedOffloadRegion, caplog: pytest.LogCaptureFixture) -> None:
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = region.address + 6 * STRIDE
    assert int(runtime.cudaHostRegister(address, STRIDE, 0)) == 0
    try:
        assert not region.pin()
        assert len(caplog.records) == 1
        assert int(torch.ones(3, device="cuda").sum()) == 3
    finally:
        assert int(runtime.cudaHostUnregister(address)) == 0
