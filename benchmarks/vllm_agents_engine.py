"""``engine_process`` for the agent loop: sessions that alternate between turns and tool calls, in
one engine."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tests.integrations.vllm.engine_process import Server, main
from tests.integrations.vllm.tiny_model import VOCABULARY

_ANSWER_TOKENS = 8
# an engine in this process takes steps, in which promotions advance, only while it has requests
_HINT_TOKENS = 4
_IDLE_S = 0.001
_NO_STORE: dict[str, Any] = {"store": False, "load": False}


class Event(NamedTuple):
    """Something that happens at a time of ``time.perf_counter``."""

    at: float
    kind: str
    """``turn``, ``prefetch`` or ``batch``."""
    session: int


@dataclass
class Pending:
    """A running request."""

    session: int
    """-1: not the turn of a session."""
    sent: float
    turn: int
    ttft: float = 0.0


@dataclass
class Loop:
    """Settings of an agent loop; times in seconds."""

    sessions: int
    turns: int
    tokens: int
    """Tokens of each session's first prompt."""
    tool_tokens: int
    """Tokens that a tool call adds."""
    pause_s: float
    """Duration of a tool call."""
    lead_s: float
    """Time from the prefetch hint to the end of the tool call."""
    batch: int
    """Requests of other users, spread over the duration of a tool call."""
    batch_tokens: int
    prefetch: bool = False
    retention: dict[str, Any] = field(default_factory=dict)
    """Options of each turn."""
    batch_retention: dict[str, Any] = field(default_factory=dict)
    """Options of the requests of other users."""


class AgentServer(Server):
    """Server of an engine that runs agent loops."""

    def agents(self, **settings: Any) -> list[dict[str, float]]:
        """Run an agent loop; return turn, TTFT in seconds, prompt tokens and reused ones of each
        turn of a session."""
        return _Run(self._llm.llm_engine, Loop(**settings)).run()


class _Run:
    """One agent loop on an engine that runs in this thread."""

    def __init__(self, engine: Any, loop: Loop) -> None:
        self._engine = engine
        self._loop = loop
        self._draw = random.Random(7)
        self._contexts = [self._tokens(loop.tokens) for _ in range(loop.sessions)]
        self._turns = [0] * loop.sessions
        self._pending: dict[str, Pending] = {}
        self._rows: list[dict[str, float]] = []
        self._sent = 0
        begin = time.perf_counter()
        self._events = [
            Event(begin + loop.pause_s * number / loop.sessions, "turn", number)
            for number in range(loop.sessions)
        ]
        if loop.batch:
            self._events.append(
                Event(begin + loop.pause_s / loop.batch / 2, "batch", -1)
            )

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(3, VOCABULARY) for _ in range(count)]

    def run(self) -> list[dict[str, float]]:
        """Run until each session has had all its turns."""
        while min(self._turns) < self._loop.turns or self._pending:
            now = time.perf_counter()
            for event in [event for event in self._events if event.at <= now]:
                self._events.remove(event)
                self._handle(event)
            outputs = self._engine.step()
            for output in outputs:
                self._learn(output)
            if not outputs:
                time.sleep(_IDLE_S)
        return self._rows

    def _handle(self, event: Event) -> None:
        loop = self._loop
        if event.kind == "turn":
            self._send(
                self._contexts[event.session],
                _ANSWER_TOKENS,
                loop.retention,
                event.session,
            )
        elif event.kind == "prefetch":
            # a request that carries a hint: a gateway knows when a tool call ends
            self._send(
                self._tokens(4),
                _HINT_TOKENS,
                _NO_STORE,
                prefetch=self._contexts[event.session],
            )
        elif min(self._turns) < loop.turns:
            self._send(self._tokens(loop.batch_tokens), 1, loop.batch_retention)
            self._events.append(event._replace(at=event.at + loop.pause_s / loop.batch))

    def _send(
        self,
        prompt: list[int],
        max_tokens: int,
        options: dict[str, Any],
        session: int = -1,
        prefetch: list[int] | None = None,
    ) -> None:
        from vllm import SamplingParams
        from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

        hints = None
        if prefetch is not None:
            action = KvHintAction(
                "1", "persistkv.prefetch", "1", {"token_ids": prefetch}
            )
            hints = KvHintsEnvelope("1", "1", [action])
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": {"persistkv": options}},
        )
        self._sent += 1
        name, turn = f"r{self._sent}", self._turns[session] if session >= 0 else 0
        self._engine.add_request(
            name, {"prompt_token_ids": list(prompt)}, sampling, kv_hints=hints
        )
        self._pending[name] = Pending(session, time.perf_counter(), turn)

    def _learn(self, output: Any) -> None:
        pending = self._pending[output.request_id]
        now = time.perf_counter()
        answer = output.outputs[0].token_ids
        if answer and not pending.ttft:
            pending.ttft = now - pending.sent
        if not output.finished:
            return
        del self._pending[output.request_id]
        if pending.session < 0:
            return
        loop, session = self._loop, pending.session
        prompt = len(self._contexts[session])
        self._rows.append(
            {
                "turn": pending.turn,
                "ttft": pending.ttft,
                "tokens": prompt,
                "cached": output.num_cached_tokens or 0,
            }
        )
        self._turns[session] += 1
        if self._turns[session] < loop.turns:
            if loop.prefetch:
                self._events.append(
                    Event(now + loop.pause_s - loop.lead_s, "prefetch", session)
                )
            self._contexts[session] += [*answer, *self._tokens(loop.tool_tokens)]
            self._events.append(Event(now + loop.pause_s, "turn", session))


if __name__ == "__main__":
    main(AgentServer)
