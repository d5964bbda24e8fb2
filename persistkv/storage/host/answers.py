"""The host's answers to questions of the engine, such as its totals."""

from __future__ import annotations

import time

from persistkv.base import StoredContext
from persistkv.storage.host import protocol

BACKGROUND_TOKEN = 0
"""Token of requests for totals for which no caller waits. ``Answers.begin_question`` counts from
1."""
_BACKGROUND_S = 5.0  # seconds between two requests for totals for which no caller waits


class Answers:
    """The last answer to each kind of question.

    One caller at a time waits for the answer to its question (``begin_question``). An answer to
    any other message is kept here until it is read.
    """

    def __init__(self) -> None:
        self.awaited: protocol.Flushed | protocol.HostStats | None = None
        """The answer to the last question; None: it has not arrived."""
        self.totals: protocol.HostStats | None = None
        """The last totals of the host that arrived."""
        self.recent: list[StoredContext] | None = None
        """Contexts in the answer to ``AskRecent``, until they are taken."""
        self.probed: protocol.Probed | None = None
        """The answer to ``Probe``, until it is taken."""
        self.probe_began: float | None = None
        """``time.monotonic`` time of the probe that the host has to answer; None: there is none."""
        self._token = BACKGROUND_TOKEN
        """Token of the last question."""
        self._next_background_at = 0.0
        """``time.monotonic`` time of the next request for totals for which no caller waits."""

    def begin_question(self) -> int:
        """Return the token of a new question, for which a caller waits."""
        self._token += 1
        self.awaited = None
        return self._token

    # Probes

    def begin_probe(self, now: float) -> None:
        """Record that a probe is sent. There is one at a time.

        :param now: ``time.monotonic`` time.
        """
        self.probe_began = now
        self.probed = None

    def end_probe(self, probed: protocol.Probed) -> None:
        """Add the answer to a probe."""
        self.probe_began = None
        self.probed = probed

    def fail_probe(self) -> None:
        """End the probe, if there is one, because the host has ended: the result is that nothing
        was read."""
        if self.probe_began is not None:
            seconds = time.monotonic() - self.probe_began
            self.end_probe(protocol.Probed(num_bytes=0, seconds=seconds))

    # Totals

    def begin_background_request(self) -> bool:
        """Return whether to ask the host now for totals for which no caller waits: at most every
        5 s."""
        now = time.monotonic()
        if now < self._next_background_at:
            return False
        self._next_background_at = now + _BACKGROUND_S
        return True

    def add(self, answer: protocol.Flushed | protocol.HostStats) -> None:
        """Add an answer that has a token. If its token is not that of the last question, its caller
        has timed out or none waits: of this answer, only totals are kept."""
        if isinstance(answer, protocol.HostStats):
            self.totals = answer
        if answer.token == self._token:
            self.awaited = answer
