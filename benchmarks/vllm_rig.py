"""vLLM engines for measurements: one model, and engines over it that differ in what lies behind their CPU tier.

They are forks of one process in vLLM's own virtual environment, and take turns: one that nobody asks does nothing.

What storing costs is a matter of how many bytes of KV an engine makes for its computing. The model has the shape of
those that people serve (few KV heads, wide layers) and makes 17 KiB of KV for each GFLOP of a prompt: a Llama 3 8B
makes 8.5 (128 KiB for the 15 GFLOP of a token), a Llama 3.2 1B 13. Its weights are random, so its keys and values are
normally distributed numbers: what the codec makes of them is no measure for what it makes of others, though real KV
that was tried became smaller by as much (``benchmarks.codecs``).
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.integrations.vllm.engines import ENVIRONMENT, PROGRAM, Engine, spawn_engine
from tests.integrations.vllm.programs import Zygote
from tests.integrations.vllm.tiny_model import VOCABULARY, make_model

BARE_FIRST = "bare_first"
ALONE, FS, OURS = "CPU tier alone", "fs", "persistkv"
MODEL: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}
CPU_TIER_BYTES = 512 << 20  # 512 MiB
_QUIET_S, _MOST_S = 0.2, 30.0
_HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""For PyTorch's memory and for all else. How fast an engine computes depends on which pages it happened to get, less so
with huge ones.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Options that all measurements with engines have."""
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm-0.32.0/bin/python"))
    parser.add_argument("--directory", help="on the disk to be measured; a temporary directory by default")
    parser.add_argument("--codec", default="planes", help="of persistkv")
    parser.add_argument("--url-options", default="", help="of persistkv's URL, e.g. placement=inline")
    parser.add_argument("--compute-threads", type=int, default=1, help="of an engine; the other cores are for I/O")


@dataclass(frozen=True)
class Turn:
    """What an engine did in one turn."""

    seconds: float
    """Until the last answer."""
    cpu_seconds: float
    """Of the engine's process and of what it started, until they came to rest."""
    ttft: list[float]
    """For each prompt, seconds to its first token."""
    tokens: list[list[int]]
    cached: list[int]
    """For each prompt, tokens that were not computed."""


class Contestant:
    """An engine, and the processes that it started.

    The thread that computes is kept on one processor, the same for all contestants: they are not alike (one has the
    disk's interrupts), and a process mostly stays where it came to lie. All other threads go where they like.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._process = psutil.Process(engine.pid)
        os.sched_setaffinity(engine.pid, {min(os.sched_getaffinity(0))})

    def turn(self, prompts: list[list[int]], max_tokens: int, *, settle: bool = True) -> Turn:
        """Answer prompts, side by side.

        :param settle: wait, outside the time that is taken, until nothing goes on any more.
        """
        before = self._cpu_seconds()
        answer = self._engine.ask(do="measure", prompts=prompts, max_tokens=max_tokens)
        if settle:
            self._settle()
        spent = self._cpu_seconds() - before
        return Turn(answer["seconds"], spent, answer["ttft"], answer["tokens"], answer["cached"])

    def _cpu_seconds(self) -> float:
        return sum(map(_cpu_seconds, [self._process, *self._process.children(recursive=True)]))

    def _settle(self) -> None:
        """Until nothing goes on; a step in between takes what has ended, and may begin what waited for it."""
        self._rest()
        self._engine.ask(do="measure", prompts=prompts_of(-2, 1, 10), max_tokens=1)
        self._rest()

    def _rest(self) -> None:
        """Until its processes have used no time for a while."""
        deadline, last = time.monotonic() + _MOST_S, -1.0
        while (spent := self._cpu_seconds()) > last + 0.02 and time.monotonic() < deadline:
            last = spent
            time.sleep(_QUIET_S)

    def stored_bytes(self) -> float:
        """What its secondary tier has taken so far, as vLLM counts it."""
        return self._engine.metrics().get("vllm:kv_offload_tiering_write_bytes", 0.0)

    def close(self) -> None:
        """Let it end; what it was given is stored then."""
        children = self._process.children(recursive=True)
        self._engine.close()
        self._engine.release()
        psutil.wait_procs(children, timeout=120)


class Switched(Contestant):
    """One engine that is two contestants; see ``vllm_switch``."""

    def use(self, *, tiered: bool) -> None:
        """Who it is from now on."""
        self._engine.ask(do="use", tiered=tiered)

    def connector_seconds(self) -> list[float]:
        """That were spent in calls of the connector with nothing behind its CPU tier so far, and of the other one."""
        seconds: list[float] = self._engine.ask(do="seconds")
        return seconds

    def idle_processors(self, seconds: float) -> float:
        """Processors that what it started, the store's process, uses while nobody asks it anything."""
        children = self._process.children(recursive=True)
        before = sum(map(_cpu_seconds, children))
        time.sleep(seconds)
        return (sum(map(_cpu_seconds, children)) - before) / seconds


class Field:
    """Where contestants are started.

    :param directory: of stores, a folder each, and of logs.
    """

    def __init__(self, directory: Path, arguments: argparse.Namespace) -> None:
        self.directory = directory
        self._model = make_model(directory / "model", **MODEL)
        self._environment = {
            "OMP_NUM_THREADS": str(arguments.compute_threads),
            "OPENBLAS_NUM_THREADS": "1",
            **_HUGE_PAGES,
            "VLLM_CACHE_ROOT": str(directory / "cache"),
            "XDG_CACHE_HOME": str(directory / "cache"),
        }
        url = f"lmdb://{self.store(OURS)}?capacity=64GiB" + f"&{arguments.url_options}" * bool(arguments.url_options)
        self._tiers: dict[str, list[dict[str, Any]]] = {
            ALONE: [],
            FS: [{"type": "fs", "root_dir": str(self.store(FS))}],
            OURS: [{"type": "persistkv", "url": url, "codec": arguments.codec}],
        }
        self._zygote = Zygote(ENVIRONMENT | self._environment, str(arguments.vllm_python))

    def store(self, name: str) -> Path:
        """The folder of a contestant's store."""
        return self.directory / name

    def start(self, name: str) -> Contestant:
        """An engine, by the name of what lies behind its CPU tier."""
        contestant = Contestant(self._engine(name, self._settings(name), PROGRAM))
        contestant.turn(prompts_of(-1, 1, 100), 4)  # kernels, allocators
        return contestant

    def start_both(self, name: str, *, bare_first: bool) -> Switched:
        """One engine with two connectors: one with what has this name behind its CPU tier, and one with nothing there.

        :param bare_first: the latter is built first.
        """
        settings = self._settings(name)
        settings["connector"] |= {BARE_FIRST: bare_first}
        settings["transfer"] = {
            "kv_connector": "SwitchConnector",
            "kv_connector_module_path": "benchmarks.vllm_switch",
        }
        switched = Switched(self._engine(name, settings, "benchmarks.vllm_switch_engine"))
        for tiered in (False, True):
            switched.use(tiered=tiered)
            switched.turn(prompts_of(-1 - tiered, 1, 100), 4)  # kernels, allocators
        return switched

    def _settings(self, name: str) -> dict[str, Any]:
        connector = {
            "spec_name": "PersistKVSpec",
            "cpu_bytes_to_use": CPU_TIER_BYTES,
            "secondary_tiers": self._tiers[name],
        }
        engine = {"dtype": "bfloat16", "max_model_len": 4096, "block_size": 32}
        return {"model": str(self._model), "connector": connector, "engine": engine}

    def _engine(self, name: str, settings: dict[str, Any], program: str) -> Engine:
        spawn = spawn_engine(self._zygote, settings, self._environment, program=program)
        return Engine(spawn, self._log(name))

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def close(self) -> None:
        """End what engines are forked from."""
        self._zygote.close()


@contextmanager
def field_of(arguments: argparse.Namespace) -> Iterator[Field]:
    """In a temporary directory, which is removed."""
    if not arguments.vllm_python.exists():
        raise SystemExit(f"{arguments.vllm_python} is not there: make setup-vllm, or --vllm-python PATH")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        field = Field(Path(directory), arguments)
        try:
            yield field
        finally:
            field.close()


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def prompts_of(seed: int, count: int, length: int) -> list[list[int]]:
    """Random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [[draw.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)]
