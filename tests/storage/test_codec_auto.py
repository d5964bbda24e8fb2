import logging

import numpy as np
import pytest

from persistkv.storage.codec import AutoCodec, PlanesCodec, RawCodec, ZstdCodec, auto
from persistkv.storage.codec.auto import SAMPLE_BYTES, SAMPLES

RNG = np.random.default_rng(3)
NOISE = RNG.bytes(1 << 18)
FLOAT32 = RNG.standard_normal(1 << 17).astype(np.float32)
BFLOAT16 = (FLOAT32.view(np.uint32) >> 16).astype(np.uint16)
TEXT = b"the same few words, again and again; " * 4000


def stopped():
    """A clock that charges nothing: size alone decides."""
    return 0.0


class Slow:
    """A clock by which each codec takes a second for a sample."""

    now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(
    ("sample", "codec"),
    [
        (BFLOAT16.tobytes(), PlanesCodec(2)),
        (FLOAT32.tobytes(), PlanesCodec(4)),
        (TEXT, ZstdCodec(1)),
        (NOISE, RawCodec()),
        (b"x", RawCodec()),
    ],
    ids=["bfloat16", "float32", "text", "noise", "one byte"],
)
def test_keeps_what_is_smallest(sample, codec):
    assert AutoCodec(clock=stopped).choose(0, lambda: sample) == codec


def test_time_is_weighed_against_size():
    assert AutoCodec(clock=Slow()).choose(0, lambda: TEXT) == RawCodec()


def test_each_group_for_itself():
    codec = AutoCodec(clock=stopped)
    assert codec.choose(0, lambda: TEXT) == ZstdCodec(1)
    assert codec.choose(1, lambda: NOISE) == RawCodec()
    assert codec.choose(0, lambda: TEXT) == ZstdCodec(1)


def test_says_once_what_it_chose(caplog):
    caplog.set_level(logging.INFO)
    codec = AutoCodec(clock=stopped)
    for _ in range(3):
        codec.choose(5, BFLOAT16.tobytes)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert "group 5 is written as planes:2" in record.getMessage()


def test_first_samples_may_mislead_and_later_ones_cost_nothing(caplog):
    caplog.set_level(logging.INFO)
    codec = AutoCodec(clock=stopped)
    assert codec.choose(0, lambda: TEXT[:4096]) == ZstdCodec(1)
    for _ in range(SAMPLES - 1):
        chosen = codec.choose(0, BFLOAT16.tobytes)
    assert chosen == PlanesCodec(2)
    assert len(caplog.records) == 2
    assert codec.choose(0, lambda: pytest.fail("it has seen enough")) == PlanesCodec(2)


def test_samples_are_bounded():
    seen = []

    class Watched(RawCodec):
        def encode(self, raw):
            seen.append(len(raw))
            return raw

    AutoCodec((Watched(),)).choose(0, lambda: bytes(3 * SAMPLE_BYTES))
    assert seen == [SAMPLE_BYTES]


def test_a_store_writes_and_reads_with_what_was_chosen(open_store, make_rows, keys, store_url, caplog, monkeypatch):
    monkeypatch.setattr(auto, "SHARE_PER_NANOSECOND", 0.0)  # size alone decides
    caplog.set_level(logging.INFO)
    rows = make_rows(32, 16 << 10, (((0, 16 << 10),), ((0, 8 << 10),)))
    rows.array[:16].view(np.uint16)[:] = BFLOAT16[: 16 * (8 << 10)].reshape(16, -1)
    before = rows.array.copy()
    names = keys(8) + keys(8, 1)
    store = open_store(store_url, rows, codec="auto")
    assert store.put("request", names, range(8, 24), [*range(8), *range(8)])
    store.flush()
    assert [record.getMessage()[:37] for record in caplog.records] == [
        "codec auto: group 0 is written as pla",
        "codec auto: group 1 is written as raw",
    ]
    pack = store.index.pack_of(names[0])
    assert pack.codecs == "planes:2,raw"
    rows.array[:] = 0
    assert store.read(names, range(8, 24)) == []
    assert (rows.array[8:16] == before[8:16]).all()
    assert (rows.array[16:24, : 8 << 10] == before[16:24, : 8 << 10]).all()
