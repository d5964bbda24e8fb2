"""A request: its options, and the tier's state of it until it ends."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from persistkv.base import OffloadKey, ReqContext, RequestDescription, get_offload_group_idx
from persistkv.errors import ConfigurationError
from persistkv.integrations.request_options import RequestOptions
from persistkv.integrations.vllm.releases import Position

logger = logging.getLogger(__name__)


def request_options(req_id: str, parameters: Mapping[str, Any] | None) -> RequestOptions:
    """Return a request's options. If they are invalid, log a warning and use neither stores nor loads: the request
    does not want the default, and must not fail because of its options.
    """
    try:
        return RequestOptions.parse(parameters)
    except ConfigurationError as error:
        logger.warning("request %s neither uses nor fills the store: %s", req_id, error)
        return RequestOptions(False, False)


class LiveRequest:
    """One request. Keys may arrive in any order; their positions determine the order in the context.

    :param position: function of the engine; None if it has none.
    :param group_tokens: tokens of one chunk, per group.
    :param labels: of all requests; the request's own take precedence.
    """

    def __init__(
        self,
        req_id: str,
        options: RequestOptions,
        position: Position | None,
        group_tokens: Sequence[int],
        labels: Mapping[str, str],
    ) -> None:
        self.options = options
        labels = {**labels, **options.labels}
        self._description = None if position is None else _Description(position, group_tokens, labels)
        self.context = ReqContext(req_id, description=self._description)
        self._is_long: bool | None = None
        self.has_stored = False
        """Whether any chunk of it was submitted to the store."""

    def wants(self, keys: Sequence[OffloadKey], min_tokens: int) -> bool:
        """Return whether these keys must be stored. The first keys of a request decide on all of them."""
        if not self.options.store:
            return False
        if self._is_long is None:
            ends = [self._description.position(key) for key in keys] if self._description is not None else [None]
            self._is_long = not min_tokens or any(end is None or end >= min_tokens for end in ends)
        return self._is_long

    def learn(self, keys: Sequence[OffloadKey]) -> ReqContext:
        """Add keys to the request's context and return it."""
        self.has_stored = True
        if self._description is not None and not self._description.learn(keys):
            self._description = None  # positions are only useful if all are known
            self.context = ReqContext(self.context.req_id)
        return self.context

    def end(self) -> ReqContext:
        """Return the whole context, in order."""
        if self._description is not None:
            self._description.sort()
        return self.context


class _Description(RequestDescription):
    """A description whose order and depths come from the engine's positions."""

    def __init__(self, position: Position, group_tokens: Sequence[int], labels: Mapping[str, str]) -> None:
        super().__init__(len(group_tokens), labels)
        self.position = position
        self._group_tokens = group_tokens
        self._ends: dict[OffloadKey, int] = {}

    def learn(self, keys: Sequence[OffloadKey]) -> bool:
        """Add the keys that are new; return False if the engine does not know the position of one of them."""
        for key in keys:
            if key in self._ends:
                continue
            end = self.position(key)
            if end is None:
                return False
            self._ends[key] = end
            self.group_keys[get_offload_group_idx(key)].append(key)
            self.num_tokens = max(self.num_tokens, end)
        return True

    def depth(self, key: OffloadKey) -> int | None:
        end = self._ends.get(key)
        return None if end is None else max(0, end // self._group_tokens[get_offload_group_idx(key)] - 1)

    def sort(self) -> None:
        """Sort each group's keys in the order of the context."""
        for chain in self.group_keys:
            chain.sort(key=self._ends.__getitem__)
