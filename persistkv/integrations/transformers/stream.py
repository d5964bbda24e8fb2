"""An answer as an iterator of tokens, computed as they are asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import torch

from persistkv.errors import EngineClosedError, PersistKVError
from persistkv.integrations.transformers.prompts import TextPieces, Tokenizer
from persistkv.integrations.transformers.request import Request
from persistkv.integrations.transformers.results import GenerateResult, Token
from persistkv.integrations.transformers.tiers import Tiers


class TokenStream(Iterator[Token]):
    """Tokens of one request, from ``Engine.stream``. Each is computed when it is asked for; other
    requests of the engine may run in between.

    A stream that is not read to its end is ended by ``close``, a ``with`` statement, or when
    nothing refers to it any more; the blocks that were computed are stored all the same. Any thread
    may use it.

    :ivar req_id: id of the request, as in ``persistkv ls``.
    :param start: begins the request in the tiers, and returns its tokens; called for the first one.
    :param lock: the engine's; held while a token is computed.
    """

    def __init__(
        self,
        request: Request,
        start: Callable[[], Iterator[int]],
        tiers: Tiers,
        lock: threading.RLock,
        tokenizer: Tokenizer,
    ) -> None:
        self.req_id = request.req_id
        self._request = request
        self._start = start
        self._tiers = tiers
        self._lock = lock
        self._tokenizer = tokenizer
        self._pieces = TextPieces(tokenizer)
        self._tokens: Iterator[int] | None = None
        """The request's generator of tokens, from ``start``; None: the request has not begun."""
        self._ids: list[int] = []
        """Ids of the tokens so far."""
        self._closed = False
        """Whether no further token is computed, after the last one, an error or ``close``."""

    def __next__(self) -> Token:
        """Compute the next token. After an error the stream has ended.

        :raises EngineClosedError: the engine was closed.
        :raises ConfigurationError: other streams may need the device blocks; nothing was run.
        """
        with self._lock, torch.no_grad():
            if self._closed:
                raise StopIteration
            try:
                token = self._compute()
            # end the request after any exception, StopIteration and KeyboardInterrupt included, so
            # that it does not keep its device blocks
            except BaseException:
                self.close()
                raise
            self._ids.append(token)
            # ``Request.run`` sets ``ended`` before it yields the last token
            last = self._request.ended
            if last:
                self.close()
            return Token(token, self._pieces.add(token, last=last))

    def _compute(self) -> int:
        """Return the id of the next token; begin the request with the first one."""
        if self._tokens is None:
            self._tokens = self._start()
        # a request that is not running was ended by the close of the engine
        if self.req_id not in self._tiers.running:
            raise EngineClosedError
        return next(self._tokens)

    def finish(self) -> GenerateResult:
        """Compute the remaining tokens, unless the stream was closed, and return the result of all
        that were computed.

        :raises PersistKVError: the stream was closed before its first token. For other errors see
            ``__next__``.
        """
        for _ in self:
            pass
        if not self._ids:
            raise PersistKVError("the stream was closed before its first token")
        return self._request.result(self._tokenizer.text(self._ids))

    def close(self) -> None:
        """End the request; no further token is computed. Idempotent."""
        with self._lock:
            self._closed = True
            was_running = self._tiers.end(self.req_id)
            # step now, to plan the store of the last blocks: the next step may be that of a later
            # request
            if was_running:
                self._tiers.step()

    def __enter__(self) -> TokenStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # acquire no lock and make no step, because this may run within any statement of any thread
        self._tiers.end(self.req_id)

    def __repr__(self) -> str:
        state = "not begun"
        if self._ids:
            state = f"{len(self._ids)} tokens"
        if self._closed:
            state += ", ended"
        return f"<TokenStream {self.req_id[:8]}: {state}>"
