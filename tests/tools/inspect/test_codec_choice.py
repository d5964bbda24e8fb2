"""Codecs that ``bench`` and ``doctor`` recommend."""

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
from persistkv.storage.format.pack_writer import PackWriter, Segment
from persistkv.storage.identity import Identity
from persistkv.testing.samples import sample_keys
from persistkv_tools.inspect.bench import CodecFigure, recommend
from persistkv_tools.inspect.doctor import CODECS
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
            segment = Segment(
                0, BLOCK_BYTES, sample_keys(1, len(blocks)), StagedBlocks([blocks])
            )
            backend.commit(
                namespace,
                CommitBatch([PackWriter(namespace, codec or RawCodec(), [segment])]),
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
    assert "persistkv bench" in found["todo"]


@pytest.mark.parametrize(("make", "codec"), [(bfloat16, PlanesCodec(2)), (noise, None)])
def test_doctor_nothing_to_gain_is_ok(
    run: Run, fill: Fill, make: Callable[[int], ByteArray], codec: Codec | None
) -> None:
    assert codec_finding(run, fill(make(32), codec))["level"] == "ok"


def test_doctor_too_little_data_is_ok(run: Run, fill: Fill) -> None:
    found = codec_finding(run, fill(bfloat16(8)))
    assert found["level"] == "ok"
    assert "too little" in found["found"]


@pytest.mark.slow
def test_bench_measures_each_codec_and_recommends_one(run: Run, fill: Fill) -> None:
    url = fill(bfloat16(64))
    found = json.loads(
        run("bench", url, "--size", "4MiB", "--rounds", "1", "--json").stdout
    )
    figures = {figure["codec"]: figure for figure in found["codecs"]}
    assert tuple(figures) == CODECS
    assert figures["raw"]["ratio"] == figures["raw"]["time"] == 1.0
    assert figures["planes:2"]["ratio"] == pytest.approx(1.5, abs=0.05)
    for figure in figures.values():
        assert figure["store_bytes_per_s"] > 0
        assert figure["load_bytes_per_s"] > 0
    assert found["advice"]["codec"] in CODECS
    assert "raw" in found["advice"]["reason"]
    assert (
        "recommended codec: "
        in run("bench", url, "--size", "4MiB", "--rounds", "1").stdout
    )


@pytest.mark.slow
def test_bench_absent_store_recommends_nothing(run: Run, url: str) -> None:
    found = json.loads(
        run("bench", url, "--size", "4MiB", "--rounds", "1", "--json").stdout
    )
    assert (found["codecs"], found["advice"]) == ([], None)
    assert any("not compared" in note for note in found["notes"])


@pytest.mark.parametrize(
    ("planes", "codec"),
    [
        ((1.5, 0.7), "planes:2"),
        ((1.5, 1.2), "planes:2"),
        ((1.5, 1.4), "raw"),
        ((1.0, 1.0), "raw"),
    ],
)
def test_recommend_weighs_ratio_against_time(
    planes: tuple[float, float], codec: str
) -> None:
    figures = [
        CodecFigure("raw", 1.0, 1e9, 1e9, 1.0),
        CodecFigure("zstd:1", 1.2, 1e8, 1e8, 10.0),
    ]
    ratio, time = planes
    advice = recommend([*figures, CodecFigure("planes:2", ratio, 1e9, 1e9, time)])
    assert advice.codec == codec
    assert f"{ratio:.2f}x" in advice.reason
