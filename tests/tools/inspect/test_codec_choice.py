"""Codecs that ``doctor`` recommends."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest

from persistkv.memory.rows import ByteArray, StagedBlocks
from persistkv.storage import open_backend
from persistkv.storage.backend import CommitBatch
from persistkv.storage.format.codec import Codec, PlanesCodec, RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_keys
from tests.tools.conftest import Run

BLOCK_BYTES = 65_536
Fill = Callable[..., str]


def bfloat16(blocks: int) -> ByteArray:
    """Return blocks of normally distributed values in bfloat16."""
    values = (
        np.random.default_rng(4)
        .standard_normal((blocks, BLOCK_BYTES // 2))
        .astype(np.float32)
    )
    return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def noise(blocks: int) -> ByteArray:
    return np.random.default_rng(4).integers(
        0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8
    )


@pytest.fixture
def fill(url: str) -> Fill:
    """Return a function that writes a pack of blocks to the store and returns the store's URL."""

    def write(blocks: ByteArray, codec: Codec | None = None) -> str:
        with closing(open_backend(url)) as backend:
            namespace = backend.open_namespace(Identity.of({})).id
            section = Section(
                0, BLOCK_BYTES, sample_keys(1, len(blocks)), StagedBlocks([blocks])
            )
            backend.commit(
                namespace,
                CommitBatch([PackWriter(namespace, codec or RawCodec(), [section])]),
            )
        return url

    return write


def codec_finding(run: Run, url: str) -> dict[str, str]:
    findings = json.loads(run("doctor", url, "--json").stdout)["findings"]
    (found,) = [finding for finding in findings if finding["check"] == "codec"]
    return found  # type: ignore[no-any-return]


def test_doctor_raw_bfloat16_recommends_planes(run: Run, fill: Fill) -> None:
    found = codec_finding(run, fill(bfloat16(32)))
    assert (found["level"], found["found"][:36]) == (
        "note",
        "codec ratio 1.00; with planes:2: 1.5",
    )
    assert "planes:2" in found["todo"]


@pytest.mark.parametrize(("make", "codec"), [(bfloat16, PlanesCodec(2)), (noise, None)])
def test_doctor_nothing_to_gain_is_ok(
    run: Run,
    fill: Fill,
    make: Callable[[int], ByteArray],
    codec: Codec | None,
) -> None:
    assert codec_finding(run, fill(make(32), codec))["level"] == "ok"


def test_doctor_too_little_data_is_ok(run: Run, fill: Fill) -> None:
    found = codec_finding(run, fill(bfloat16(8)))
    assert found["level"] == "ok"
    assert "too little" in found["found"]
