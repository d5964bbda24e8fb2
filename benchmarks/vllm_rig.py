"""vLLM engines for benchmarks: one model, and engines that differ in the secondary tier behind
their CPU tier.

All engines are forks of one process in vLLM's own virtual environment. They take turns: an engine
without requests is idle.

The cost of storing depends on the bytes of KV that a model makes per unit of computation. This
model has the proportions of commonly served models (few KV heads, wide layers) and makes 17 KiB of
KV for each GFLOP of a prompt: Llama 3 8B makes 8.5 (128 KiB for the 15 GFLOP of a token), Llama 3.2
1B makes 13. The weights are random, so keys and values are normally distributed. Their compression
ratio therefore says nothing about other models, although the real KV that was tried compressed
equally well (``benchmarks.codecs``).
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

from tests.integrations.vllm.engines import (
    ENVIRONMENT,
    PROGRAM,
    TWO_WORKERS,
    Engine,
    spawn_engine,
)
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
"""Huge pages for PyTorch's memory and for all other memory. An engine's speed depends on the
physical pages that it got; huge pages reduce the effect.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that all benchmarks with engines share."""
    parser.add_argument(
        "--vllm-python", type=Path, default=Path(".venv-vllm-0.32.0/bin/python")
    )
    parser.add_argument(
        "--directory",
        help="on the disk to be measured; a temporary directory by default",
    )
    parser.add_argument("--codec", default="planes", help="of persistkv")
    parser.add_argument(
        "--url-options", default="", help="of persistkv's URL, e.g. placement=inline"
    )
    parser.add_argument(
        "--compute-threads",
        type=int,
        default=1,
        help="of an engine; the other cores are for I/O",
    )


@dataclass(frozen=True)
class Turn:
    """Measurements of an engine in one turn."""

    seconds: float
    """Seconds until the last answer."""
    cpu_seconds: float
    """CPU seconds of the engine's process and its child processes; with ``settle``, until they are
    idle."""
    ttft: list[float]
    """Seconds to the first token of each prompt."""
    tokens: list[list[int]]
    cached: list[int]
    """Tokens of each prompt that were reused, not computed."""


class Contestant:
    """An engine and its child processes.

    The computing thread is pinned to one processor, the same for all contestants: the processors
    differ (one serves the disk's interrupts), and the kernel rarely migrates a process. All other
    threads may run on any processor.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._process = psutil.Process(engine.pid)
        os.sched_setaffinity(engine.pid, {min(os.sched_getaffinity(0))})

    def turn(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        *,
        settle: bool = True,
    ) -> Turn:
        """Answer the prompts concurrently.

        :param settle: afterwards, outside the measured seconds, wait until the engine and its child
            processes are idle.
        """
        before = self._cpu_seconds()
        answer = self._engine.ask(do="measure", prompts=prompts, max_tokens=max_tokens)
        if settle:
            self._settle()
        spent = self._cpu_seconds() - before
        return Turn(
            answer["seconds"], spent, answer["ttft"], answer["tokens"], answer["cached"]
        )

    def _cpu_seconds(self) -> float:
        return sum(
            map(_cpu_seconds, [self._process, *self._process.children(recursive=True)])
        )

    def _settle(self) -> None:
        """Wait until all processes are idle.

        One engine step in between collects the jobs that have ended, and may start jobs that waited
        for them.
        """
        self._rest()
        self._engine.ask(do="measure", prompts=prompts_of(-2, 1, 10), max_tokens=1)
        self._rest()

    def _rest(self) -> None:
        """Wait until the processes use at most 20 ms of CPU time in 0.2 s; for 30 s at most."""
        deadline, last = time.monotonic() + _MOST_S, -1.0
        while (
            spent := self._cpu_seconds()
        ) > last + 0.02 and time.monotonic() < deadline:
            last = spent
            time.sleep(_QUIET_S)

    def stored_bytes(self) -> float:
        """Return the bytes that the secondary tier accepted so far, from vLLM's metrics."""
        return self._engine.metrics().get("vllm:kv_offload_tiering_write_bytes", 0.0)

    def close(self) -> None:
        """Close the engine and wait for its child processes, which first complete pending
        stores."""
        children = self._process.children(recursive=True)
        self._engine.close()
        self._engine.release()
        psutil.wait_procs(children, timeout=120)


class Switched(Contestant):
    """One engine that serves as two contestants; see ``vllm_switch``."""

    def use(self, *, tiered: bool) -> None:
        """Use the connector with secondary tiers, or the one without, from the next turn on."""
        self._engine.ask(do="use", tiered=tiered)

    def connector_seconds(self) -> list[float]:
        """Return the seconds so far in calls of the connector without secondary tiers, and of the
        one with them."""
        seconds: list[float] = self._engine.ask(do="seconds")
        return seconds

    def idle_processors(self, seconds: float) -> float:
        """Return the number of processors that the child processes (the store's host) use without
        requests."""
        children = self._process.children(recursive=True)
        before = sum(map(_cpu_seconds, children))
        time.sleep(seconds)
        return (sum(map(_cpu_seconds, children)) - before) / seconds


class Field:
    """Factory of contestants.

    :param directory: holds the model, the logs, and one folder per store.
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
        url = (
            f"lmdb://{self.store(OURS)}?capacity=64GiB"
            + f"&{arguments.url_options}" * bool(arguments.url_options)
        )
        self._tiers: dict[str, list[dict[str, Any]]] = {
            ALONE: [],
            FS: [{"type": "fs", "root_dir": str(self.store(FS))}],
            OURS: [{"type": "persistkv", "url": url, "codec": arguments.codec}],
        }
        self._python = arguments.vllm_python.absolute()
        self._zygote = Zygote(
            ENVIRONMENT | self._environment, str(arguments.vllm_python)
        )

    def store(self, name: str) -> Path:
        """Return the folder of a contestant's store."""
        return self.directory / name

    def start(self, name: str) -> Contestant:
        """Start an engine and warm it up; ``name`` selects the secondary tier."""
        contestant = Contestant(self._engine(name, self._settings(name), PROGRAM))
        contestant.turn(prompts_of(-1, 1, 100), 4)  # warms up kernels and allocators
        return contestant

    def start_both(self, name: str, *, bare_first: bool) -> Switched:
        """Start one engine with two connectors: one with the named secondary tier behind its CPU
        tier, one without any.

        :param bare_first: build the connector without secondary tiers first.
        """
        settings = self._settings(name)
        settings["connector"] |= {BARE_FIRST: bare_first}
        settings["transfer"] = {
            "kv_connector": "SwitchConnector",
            "kv_connector_module_path": "benchmarks.vllm_switch",
        }
        switched = Switched(
            self._engine(name, settings, "benchmarks.vllm_switch_engine")
        )
        for tiered in (False, True):
            switched.use(tiered=tiered)
            # warms up kernels and allocators
            switched.turn(prompts_of(-1 - tiered, 1, 100), 4)
        return switched

    def start_engine(
        self,
        name: str,
        tiers: list[dict[str, Any]],
        *,
        cpu_bytes: int,
        program: str,
        **options: Any,
    ) -> Engine:
        """Start an engine with other secondary tiers than those of the contestants.

        :param name: of its log.
        :param cpu_bytes: size of the CPU tier.
        :param program: module that the engine's process runs, similar to ``engine_process``.
        :param options: of the engine.
        """
        return self._engine(name, self._settings_of(tiers, cpu_bytes, options), program)

    def start_two_workers(self, name: str) -> Engine:
        """Start an engine with two tensor-parallel workers, all its processes new; ``name`` selects
        the tier."""
        options = dict(TWO_WORKERS)
        environment, command = options.pop("environment"), [str(self._python)]
        del options["command"]
        settings = self._settings_of(self._tiers[name], CPU_TIER_BYTES, options)
        spawn = spawn_engine(
            self._zygote, settings, self._environment | environment, command
        )
        return Engine(spawn, self._log(name))

    def _settings(self, name: str) -> dict[str, Any]:
        return self._settings_of(self._tiers[name], CPU_TIER_BYTES, {})

    def _settings_of(
        self,
        tiers: list[dict[str, Any]],
        cpu_bytes: int,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        connector = {
            "spec_name": "PersistKVSpec",
            "cpu_bytes_to_use": cpu_bytes,
            "secondary_tiers": tiers,
        }
        engine = {
            "dtype": "bfloat16",
            "max_model_len": 4096,
            "block_size": 32,
            **options,
        }
        return {"model": str(self._model), "connector": connector, "engine": engine}

    def _engine(self, name: str, settings: dict[str, Any], program: str) -> Engine:
        spawn = spawn_engine(self._zygote, settings, self._environment, program=program)
        return Engine(spawn, self._log(name))

    def _log(self, name: str) -> Path:
        return self.directory / f"{name}.log"

    def close(self) -> None:
        """End the process that engines are forked from."""
        self._zygote.close()


@contextmanager
def field_of(arguments: argparse.Namespace) -> Iterator[Field]:
    """Yield a field in a temporary directory, and remove the directory afterwards."""
    if not arguments.vllm_python.exists():
        raise SystemExit(
            f"{arguments.vllm_python} is not there: make setup-vllm, or --vllm-python PATH"
        )
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
    """Return prompts of random tokens, the same for the same seed."""
    draw = random.Random(seed)
    return [
        [draw.randrange(3, VOCABULARY) for _ in range(length)] for _ in range(count)
    ]
