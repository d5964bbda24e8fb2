"""vLLM's OpenAI-compatible server, reached over a Unix socket."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from tests.integrations.vllm.programs import Program, Spawn

PROGRAM = "vllm.entrypoints.openai.api_server"
ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}


def server_arguments(model: Path, sock: Path, connector: dict[str, Any]) -> list[str]:
    """Return the options of the command line, equal to those that ``engine_process`` sets for its engine."""
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
        "shutdown-timeout": 120,  # by default it kills its processes at once, and with them the store's
        "kv-transfer-config": json.dumps(transfer),
    }
    flags = ["--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"]
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
        connection = _UnixConnection(self._socket)
        try:
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            answer = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise http.client.HTTPException(f"{response.status}: {answer}")
        return answer

    def generate(self, *prompts: list[int], params: dict[str, Any] | None = None) -> dict[str, Any]:
        """Complete one prompt after the other; return answers and cached tokens as ``engines.Engine`` does."""
        answers = [self._complete(prompt, params) for prompt in prompts]
        return {
            "tokens": [answer["choices"][0]["token_ids"] for answer in answers],
            "cached": [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers],
        }

    def _complete(self, prompt: list[int], params: dict[str, Any] | None) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": 12,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": params,
        }
        return json.loads(self.request("POST", "/v1/completions", body))

    def metrics(self) -> str:
        """Return the metrics in Prometheus' format."""
        return self.request("GET", "/metrics")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=600)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
