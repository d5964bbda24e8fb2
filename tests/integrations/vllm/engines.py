"""vLLM engines in processes, for tests and benchmarks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.integrations.vllm.programs import Program, Spawn, Zygote, new_process

PROGRAM = "tests.integrations.vllm.engine_process"
AWS_ACCESS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "testsecret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
ENVIRONMENT = {
    **AWS_ACCESS,
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "OMP_NUM_THREADS": "1",
    # cache of vLLM's inspection of model classes, each in a process
    "VLLM_CACHE_ROOT": f"{sys.prefix}/cache",
    # starts two processes less; the scheduler is the same
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


TWO_WORKERS: dict[str, Any] = {
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"},
    "command": [sys.executable],
}
"""Arguments of the fixture ``start_engine`` for an engine with two workers."""


class Engine(Program):
    """Engine in a process; see ``engine_process``."""

    def __init__(self, spawn: Spawn, log: Path) -> None:
        super().__init__(spawn, log)
        try:
            self.answer()
        except BaseException:
            self.release()
            raise

    def generate(self, *prompts: list[int], **arguments: Any) -> Any:
        """Return the answers and the numbers of cached tokens, one list each."""
        return self.ask(do="generate", prompts=list(prompts), **arguments)

    def metrics(self) -> dict[str, float]:
        """See ``engine_process.Server.metrics``."""
        found: dict[str, float] = self.ask(do="metrics")
        return found

    def close(self) -> None:
        """End the input and wait until the engine exits."""
        self.end_input()
        assert self.wait(180), f"the engine does not end:\n{self.log[-6000:]}"


def spawn_engine(
    zygote: Zygote,
    settings: dict[str, Any],
    environment: dict[str, str],
    command: list[str] | None = None,
    program: str = PROGRAM,
) -> Spawn:
    """Spawn ``engine_process`` or a similar program, as a fork of ``zygote`` or by the interpreter
    in ``command``."""
    arguments = [json.dumps(settings)]
    if command is None:
        return zygote.fork(program, arguments, environment)
    return new_process([*command, "-m", program, *arguments], ENVIRONMENT | environment)
