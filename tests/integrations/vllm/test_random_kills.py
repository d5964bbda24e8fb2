"""vLLM's server with eight clients, killed at random: all answers are correct, and every restart is
warm.

``PERSISTKV_KILL_SECONDS`` is the minimum duration (default 90). ``PERSISTKV_KILL_SEED`` seeds the
times, the prompts and the process that is killed first.

Rounding depends on which requests share a batch, so a comparison of answers is sound only where
rounding cannot change a greedy choice. A reference engine without persistkv computes each answer
and its margin: the smallest difference between the log-probabilities of the chosen token and of the
second one. Prompts with a margin below 0.01 are not used. The reference engine computes the margins
twice, with different batches and cached prefixes; the two margins of a prompt must differ by less
than 0.001.
"""

from __future__ import annotations

import http.client
import os
import random
import sys
import threading
import time
from typing import NamedTuple

import pytest

from tests.integrations.vllm.conftest import StartServer, prompt, tier
from tests.integrations.vllm.engines import Engine
from tests.integrations.vllm.server import Server

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(3600)]

SECONDS = float(os.environ.get("PERSISTKV_KILL_SECONDS", "90"))
SEED = int(os.environ.get("PERSISTKV_KILL_SEED", "0"))
CLIENTS = 8
SESSIONS = 100
TURNS = (400, 790, 1190)
"""Tokens of the prompts of a session; each prompt is a prefix of the next one."""
MIN_MARGIN = 0.01
LIFE_S = (10.0, 50.0)
"""Bounds of the time from a server's start to its kill, in seconds: 30 on average."""
ACCEPTED_S = 1.0
"""Seconds after which the store has accepted the blocks of an answered request."""
PROBES = 4


class Question(NamedTuple):
    """Prompt, and the answer of the reference engine."""

    tokens: list[int]
    answer: list[int]

    @property
    def cached(self) -> int:
        """Tokens that a store with the whole prompt supplies: all whole blocks before the last
        token."""
        return (len(self.tokens) - 1) // 32 * 32


class Clients:
    """Threads that send questions and compare the answers; they wait while no server runs."""

    def __init__(self, questions: list[Question]) -> None:
        self.wrong: list[str] = []
        self.failures: list[Exception] = []
        self.answers = self.interrupted = self.served = 0
        self.answered: dict[int, float] = {}
        """Index of each answered question, and the time of its first answer."""
        self._questions = questions
        self._server: Server | None = None
        self._changed = threading.Condition()
        self._ended = False
        self._threads = [
            threading.Thread(target=self._run, args=(number,))
            for number in range(CLIENTS)
        ]
        for thread in self._threads:
            thread.start()

    def use(self, server: Server | None) -> None:
        """Send further questions to this server; None: wait."""
        with self._changed:
            self._server = server
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def accepted(self) -> list[int]:
        """Return the indices of the questions whose blocks the store has certainly accepted."""
        with self._changed:
            return [
                index
                for index, when in self.answered.items()
                if when < time.monotonic() - ACCEPTED_S
            ]

    def check(self, server: Server, index: int) -> int:
        """Ask one question; record a wrong answer; return the number of cached tokens."""
        question = self._questions[index]
        found = server.generate(question.tokens)
        (tokens,), (cached,) = found["tokens"], found["cached"]
        with self._changed:
            self.answers += 1
            self.served += cached
            self.answered.setdefault(index, time.monotonic())
            if tokens != question.answer:
                self.wrong.append(
                    f"question {index}, {cached} tokens cached: {tokens} instead of "
                    f"{question.answer}"
                )
        return int(cached)

    def _run(self, number: int) -> None:
        draw = random.Random(1000 * SEED + number)
        while True:
            index = draw.randrange(len(self._questions))
            with self._changed:
                if self.answered and draw.random() < 0.5:
                    index = draw.choice(list(self.answered))
                self._changed.wait_for(lambda: self._server is not None or self._ended)
                server = self._server
            if self._ended or server is None:
                return
            try:
                self.check(server, index)
            except (OSError, http.client.HTTPException):
                with self._changed:
                    self.interrupted += 1
                    if self._server is server:
                        self._changed.wait(0.1)
            except Exception as error:
                self.failures.append(error)
                return


KILLS = [Server.kill_core, Server.kill_front_end, Server.kill_tree]


@pytest.fixture(scope="module")
def questions(plain_engine: Engine) -> list[Question]:
    """Questions whose answers do not depend on rounding."""
    prompts = [
        prompt(100 + session, length) for session in range(SESSIONS) for length in TURNS
    ]
    answers = plain_engine.generate(*prompts)["tokens"]
    margins = plain_engine.ask(do="margins", prompts=prompts)
    backwards = plain_engine.ask(do="margins", prompts=prompts[::-1])
    found = []
    for tokens, answer, margin, other in zip(
        prompts, answers, margins, backwards[::-1], strict=True
    ):
        assert abs(margin - other) < MIN_MARGIN / 10
        if margin >= MIN_MARGIN:
            found.append(Question(tokens, answer))
    assert len(found) > len(prompts) / 2
    return found


def test_server_killed_at_random_answers_correctly_and_restarts_warm(
    start_server: StartServer,
    url: str,
    questions: list[Question],
    capsys: pytest.CaptureFixture[str],
) -> None:
    draw = random.Random(SEED)
    first = draw.randrange(len(KILLS))
    clients = Clients(questions)
    kills: list[str] = []
    probes: list[tuple[int, int]] = []
    end = time.monotonic() + SECONDS
    try:
        server = start_server(tier(url))
        while time.monotonic() < end or len(kills) < len(KILLS):
            clients.use(server)
            time.sleep(draw.uniform(*LIFE_S))
            accepted = clients.accepted()
            kill = KILLS[(first + len(kills)) % len(KILLS)]
            kills.append(kill.__name__)
            kill(server)
            clients.use(None)
            assert server.wait(120), server.log[-6000:]
            server.release()
            server = start_server(tier(url))
            for index in draw.sample(accepted, min(PROBES, len(accepted))):
                probes.append((clients.check(server, index), questions[index].cached))
    finally:
        clients.close()
    with capsys.disabled():
        sys.stdout.write(
            f"\n{SECONDS:.0f} s, {len(questions)} questions, kills: {', '.join(kills)}; "
            f"{clients.answers} answers, "
            f"{len(clients.wrong)} wrong, {clients.interrupted} interrupted, {clients.served} "
            f"tokens cached; "
            f"{sum(cached == full for cached, full in probes)} of {len(probes)} questions "
            f"right after restarts warm\n"
        )
    assert not clients.wrong
    assert not clients.failures
    assert clients.answers > CLIENTS * len(kills)
    assert len(probes) >= len(kills)
    assert [cached for cached, _ in probes] == [full for _, full in probes]
