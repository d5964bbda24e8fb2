"""Measure what a group's bytes are worth to each codec, and keep the one that pays.

A codec costs the share of the bytes that it leaves, and the time it takes: a nanosecond for a byte, encoding and
decoding together, counts as much as 5 % of the bytes. So a codec that runs at 1 GB/s each way (2 ns) pays from a saving
of 10 % on, and one that saves a third may run at 0.3 GB/s each way. ``raw`` costs exactly 1, for it costs no time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

from persistkv.errors import ConfigurationError
from persistkv.storage.codec.base import Buffer, Codec, CodecPolicy
from persistkv.storage.codec.planes import PlanesCodec
from persistkv.storage.codec.raw import RawCodec
from persistkv.storage.codec.zstd import ZstdCodec

logger = logging.getLogger(__name__)

SAMPLES = 4  # frames of each group, one from each of its first packs; what they say together stands until the end
SAMPLE_BYTES = 1 << 20  # 1 MiB: of each of these frames at most
SHARE_PER_NANOSECOND = 0.05
"""What a nanosecond for each byte costs, as a share of the bytes."""

CANDIDATES: tuple[Codec, ...] = (PlanesCodec(2), PlanesCodec(4), ZstdCodec(1))


@dataclass
class _Trial:
    """What one codec did with the samples of a group."""

    codec: Codec
    raw: int = 0
    stored: int = 0
    seconds: float = 0.0

    def add(self, sample: Buffer, clock: Callable[[], float]) -> None:
        out = memoryview(bytearray(len(sample)))
        begin = clock()
        stored = self.codec.encode(sample)
        self.codec.decode_into(stored, out)
        self.seconds += clock() - begin
        self.raw += len(sample)
        self.stored += min(len(stored), len(sample))

    @property
    def share(self) -> float:
        """Of the bytes that are left."""
        return self.stored / self.raw

    @property
    def cost(self) -> float:
        """See the top of this file."""
        return self.share + SHARE_PER_NANOSECOND * self.seconds * 1e9 / self.raw


@dataclass
class _Group:
    trials: list[_Trial]
    samples: int = 0
    chosen: Codec = field(default_factory=RawCodec)


class AutoCodec(CodecPolicy):
    """Chooses for each group, from the first frames of its first packs, and logs what it chose.

    Belongs to one open namespace and is used from one thread: what was measured is kept in it.
    """

    name: ClassVar[str] = "auto"

    def __init__(
        self, candidates: tuple[Codec, ...] = CANDIDATES, clock: Callable[[], float] = time.thread_time
    ) -> None:
        """Nothing is measured yet.

        :param clock: seconds; by default those that this thread had a processor.
        """
        self._candidates = candidates
        self._clock = clock
        self._groups: dict[int, _Group] = {}

    @classmethod
    def parse(cls, argument: str) -> AutoCodec:
        """Takes no argument.

        :raises ConfigurationError: where there is one.
        """
        if argument:
            raise ConfigurationError("codec", f"auto:{argument}", "auto, without an argument")
        return cls()

    def __str__(self) -> str:
        return self.name

    def choose(self, group: int, sample: Callable[[], Buffer]) -> Codec:
        """A few milliseconds for each of a group's first packs, then nothing."""
        state = self._groups.setdefault(group, _Group([_Trial(codec) for codec in self._candidates]))
        if state.samples < SAMPLES:
            self._measure(group, state, memoryview(sample())[:SAMPLE_BYTES])
        return state.chosen

    def _measure(self, group: int, state: _Group, sample: memoryview) -> None:
        for trial in state.trials:
            trial.add(sample, self._clock)
        best = min(state.trials, key=lambda trial: trial.cost)
        chosen = best.codec if best.cost < 1 else RawCodec()
        if not state.samples or chosen != state.chosen:
            logger.info("codec auto: group %d is written as %s (%s)", group, chosen, _summary(state.trials))
        state.chosen = chosen
        state.samples += 1


def _summary(trials: list[_Trial]) -> str:
    return ", ".join(
        f"{trial.codec} leaves {trial.share:.0%} at {trial.seconds * 1e9 / trial.raw:.1f} ns a byte" for trial in trials
    )
