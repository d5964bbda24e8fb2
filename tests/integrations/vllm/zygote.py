"""Process that imports vLLM once and forks for each program: ``zygote.py SOCKET``.

An import takes half a minute on a slow core, a fork takes no time. Each message on the socket is
JSON, ``{"module": …, "arguments": […], "environment": {…}}``, with three descriptors: the program's
input, output and log. The answer is the program's process id. The process exits when its socket
closes; its programs continue.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import signal
import socket
import sys

IMPORTED_LATE = (
    "vllm",
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector",
    "vllm.v1.kv_offload.tiering.spec",
)
"""Slow imports that an engine performs when it starts."""
MAX_MESSAGE = 1 << 16


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in IMPORTED_LATE:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) != 1:
        sys.exit(
            "an import started threads: a fork of this process would lack them, and may hold "
            "their locks"
        )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the programs
    control.send(b"ready")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MAX_MESSAGE, 3)
        if not message:
            return
        pid = os.fork()
        if pid == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())
    control.close()
    _become(descriptors, **json.loads(message))


def _become(
    descriptors: list[int],
    module: str,
    arguments: list[str],
    environment: dict[str, str],
) -> None:
    """Run a module in a new session, with the effect of ``python -m``."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
