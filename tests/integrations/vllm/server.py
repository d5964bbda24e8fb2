"""vLLM's OpenAI-compatible server, reached over a Unix socket."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tests.host_processes import descendants, kill_tree
from tests.integrations.vllm.programs import Program, Spawn

PROGRAM = "vllm.entrypoints.openai.api_server"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def server_arguments(
    model: Path,
    sock: Path,
    connector: dict[str, Any],
    shutdown_timeout: int,
) -> list[str]:
    """Return the options of the command line, equal to those that ``engine_process`` sets for its
    engine.

    :param shutdown_timeout: seconds for running requests and accepted contexts after SIGTERM; 0 is
        vLLM's default, and kills all processes after five seconds.
    """
    transfer = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": connector,
    }
    options = {
        "model": model,
        "uds": sock,
        "max-model-len": 2048,
        "dtype": "float32",
        "seed": 0,
        "block-size": 32,
        "max-num-seqs": 4,
        "shutdown-timeout": shutdown_timeout,
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = [
        "--skip-tokenizer-init",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
    ]
    return [f"--{name}={value}" for name, value in options.items()] + flags


class Server(Program):
    """Server that is ready for requests."""

    def __init__(self, spawn: Spawn, log: Path, sock: Path) -> None:
        super().__init__(lambda stdin, _, stderr: spawn(stdin, stderr, stderr), log)
        self._socket = sock
        try:
            self._await_health()
        except BaseException:
            self.release()
            raise

    def _await_health(self) -> None:
        deadline = time.monotonic() + 600
        while True:
            try:
                self.request("GET", "/health")
                return
            except (OSError, http.client.HTTPException):
                if self.wait(0.2) or time.monotonic() > deadline:
                    raise RuntimeError(f"no server:\n{self.log[-6000:]}") from None

    def request(self, method: str, path: str, body: Any = None) -> str:
        """Send a request; return the body of the response.

        :raises http.client.HTTPException: the status is not 200.
        """
        with closing(_UnixConnection(self._socket)) as connection:
            response = self._send(connection, method, path, body)
            answer = response.read().decode()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {answer}")
        return answer

    def _send(
        self,
        connection: _UnixConnection,
        method: str,
        path: str,
        body: Any,
    ) -> http.client.HTTPResponse:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        return connection.getresponse()

    def generate(
        self,
        *prompts: list[int],
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Complete one prompt after the other; return answers and cached tokens as
        ``engines.Engine`` does."""
        answers = [
            json.loads(
                self.request("POST", "/v1/completions", _body(prompt, 12, params))
            )
            for prompt in prompts
        ]
        return {
            "tokens": [answer["choices"][0]["token_ids"] for answer in answers],
            "cached": [
                answer["usage"]["prompt_tokens_details"]["cached_tokens"]
                for answer in answers
            ],
        }

    @contextmanager
    def running_request(
        self,
        prompt: list[int],
        max_tokens: int,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send a streaming request and read its first line; the caller may read the rest. The
        context closes the connection. A draining server waits until the answer is read or the
        connection is closed.
        """
        with closing(_UnixConnection(self._socket)) as connection:
            body = _body(prompt, max_tokens, None) | {"stream": True}
            response = self._send(connection, "POST", "/v1/completions", body)
            assert response.readline(), "the server closed the connection"
            yield response

    def metrics(self) -> str:
        """Return the metrics in Prometheus' format."""
        return self.request("GET", "/metrics")

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels; 0 if there is no such metric."""
        lines = (
            line
            for line in self.metrics().splitlines()
            if line.partition("{")[0] == name
        )
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def engine_core(self) -> int:
        """Return the process id of vLLM's scheduler, which the server starts as a process of its
        own."""
        (found,) = [
            pid
            for pid in descendants(self.pid)
            if _command_line(pid).startswith("VLLM::EngineCore")
        ]
        return found

    def kill_core(self) -> None:
        """Send SIGKILL to the engine core."""
        os.kill(self.engine_core(), signal.SIGKILL)

    def kill_front_end(self) -> None:
        """Send SIGKILL to the process that answers HTTP, the parent of the others."""
        os.kill(self.pid, signal.SIGKILL)

    def kill_tree(self) -> None:
        """Send SIGKILL to all processes of the server."""
        kill_tree(self.pid)


def _body(
    prompt: list[int],
    max_tokens: int,
    params: dict[str, Any] | None,
) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": params,
    }


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:  # the process has ended
        return ""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=600)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
