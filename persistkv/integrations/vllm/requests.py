"""A request of vLLM: its options, and the tier's record of it until it ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Annotated, Any, NamedTuple

import msgspec

from persistkv.base import (
    REQUEST_PARAMETER,
    OffloadKey,
    ReqContext,
    RequestDescription,
    get_offload_group_idx,
)
from persistkv.errors import ConfigurationError
from persistkv.integrations.request_options import RequestOptions
from persistkv.storage.records import Choice
from persistkv.tenants import TenantKeys
from persistkv.tiering.load_cost import LoadDecision

logger = logging.getLogger(__name__)

Position = Callable[[OffloadKey], "int | None"]
"""Function from a key to its position: tokens of the request up to the end of the key's chunk; None
if unknown."""

RETAIN = "persistkv.retain"
"""Type of a hint whose payload has ``RequestOptions`` for its request."""
PREFETCH = "persistkv.prefetch"
"""Type of a hint whose payload is a ``Prefetch``."""
HINT_VERSION = "1"

_WITHOUT_STORE = RequestOptions(store=False, load=False)
"""Options of a request that neither uses nor fills the store."""


class Prefetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contexts to promote for later requests, chosen by exactly one of ``request``, ``labels`` and
    ``token_ids``."""

    request: str | None = None
    """Id of a stored context, as ``persistkv ls --json`` shows it, or the start of the id. None:
    not chosen by id."""
    labels: dict[str, str] = {}
    """Labels that the contexts have, with these values. Empty: not chosen by labels."""
    token_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    """Tokens of the context from its beginning on. Empty: not chosen by tokens."""
    cache_salt: str | None = None
    """The ``cache_salt`` of the context's requests; only with ``token_ids``."""

    @classmethod
    def parse(cls, payload: object) -> Prefetch:
        """Convert the payload of a hint, or the option ``prefetch`` of a request; raise ValueError
        if it is invalid."""
        prefetch = msgspec.convert(payload, cls)
        ways = (prefetch.request, prefetch.labels, prefetch.token_ids)
        num_ways = sum(1 for way in ways if way)
        has_stray_salt = prefetch.cache_salt is not None and not prefetch.token_ids
        if num_ways != 1 or has_stray_salt:
            raise ValueError(
                'expected "request", "labels" or "token_ids" (with or without "cache_salt")'
            )
        return prefetch

    def choice(self, tenant: str) -> Choice:
        """Return the filter of a tenant's stored contexts; not for contexts chosen by
        ``token_ids``."""
        return Choice(self.request, self.labels, tenant)


class GivenOptions(NamedTuple):
    """Options of a request of vLLM, for the tier."""

    options: RequestOptions
    """Options of the hints and the parameters together."""
    prefetches: list[Prefetch]
    """Contexts to promote for later requests."""
    is_refused: bool = False
    """Whether the request neither uses nor fills the store, because its options are invalid."""


def request_options(
    req_id: str,
    parameters: Mapping[str, Any] | None,
    actions: Sequence[Any] = (),
) -> GivenOptions:
    """Return a request's options, and the contexts to promote for later requests.

    Hints take precedence over ``kv_transfer_params``. An invalid hint, or an invalid option
    ``prefetch`` of the parameters, is ignored with a warning. If another parameter is invalid, or
    an invalid hint names a tenant, log a warning and refuse the request: it neither uses nor fills
    the store. With the default options instead, it could store what the client has excluded, or
    under another tenant. It does not fail, because vLLM can compute it without the store.

    :param parameters: the request's ``kv_transfer_params``.
    :param actions: the ``KvHintAction`` objects of the request; those for other components are
        skipped.
    """
    # parse the prefetch on its own, because an invalid one must not refuse the request
    separated = _separate_prefetch(parameters)
    prefetches = _parse_prefetch(req_id, separated.prefetch)
    options = _WITHOUT_STORE  # if the parameters are invalid, hints are only checked for errors
    is_refused = False
    try:
        options = RequestOptions.parse(separated.others)
    except ConfigurationError as error:
        logger.warning("request %s neither uses nor fills the store: %s", req_id, error)
        is_refused = True
    # check all hints, even those of a refused request, so that each invalid one is logged
    for action in actions:
        if not action.action_type.startswith("persistkv."):
            continue
        try:
            _check_hint(action)
            if action.action_type == RETAIN:
                options = _with_hint(options, action.payload)
            else:
                prefetch = Prefetch.parse(action.payload)
                prefetches.append(prefetch)
        except (ConfigurationError, ValueError, TypeError) as error:
            refuses = _refuses_if_invalid(action)
            _log_invalid_hint(req_id, action, error, refuses=refuses)
            is_refused = is_refused or refuses
    if is_refused:
        return GivenOptions(_WITHOUT_STORE, prefetches=[], is_refused=True)
    return GivenOptions(options, prefetches)


class _SeparatedPrefetch(NamedTuple):
    """A request's ``kv_transfer_params``, divided."""

    prefetch: object
    """The option ``prefetch``; None: there is none."""
    others: Mapping[str, Any] | None
    """The parameters without it."""


def _separate_prefetch(parameters: Mapping[str, Any] | None) -> _SeparatedPrefetch:
    """Return a request's ``kv_transfer_params`` in two parts."""
    # check the type, because clients pass any value by ``vllm_xargs``
    if not isinstance(parameters, Mapping):
        return _SeparatedPrefetch(None, parameters)
    options = parameters.get(REQUEST_PARAMETER)
    if not isinstance(options, Mapping) or "prefetch" not in options:
        return _SeparatedPrefetch(None, parameters)
    other_options = dict(options)
    prefetch = other_options.pop("prefetch")
    others = {**parameters, REQUEST_PARAMETER: other_options}
    return _SeparatedPrefetch(prefetch, others)


def _parse_prefetch(req_id: str, payload: object) -> list[Prefetch]:
    """Return the prefetch in a request's parameters; none if there is none, or if it is invalid,
    which is logged."""
    if payload is None:
        return []
    try:
        return [Prefetch.parse(payload)]
    except ValueError as error:
        logger.warning(
            "request %s: ignored prefetch in its kv_transfer_params: %s",
            req_id,
            error,
        )
        return []


def _refuses_if_invalid(action: Any) -> bool:
    """Return whether an invalid hint refuses its request: the hint names a tenant, and a request
    without this name would be one of the default tenant."""
    # a prefetch concerns later requests, so it never refuses the request that has the hint
    if action.action_type == PREFETCH:
        return False
    return isinstance(action.payload, Mapping) and "tenant" in action.payload


def _log_invalid_hint(
    req_id: str,
    action: Any,
    error: Exception,
    *,
    refuses: bool,
) -> None:
    """Log that a hint is invalid, and whether it refuses its request."""
    logger.warning(
        "request %s %s its hint %s: %s",
        req_id,
        "neither uses nor fills the store, because of" if refuses else "ignored",
        action.action_type,
        error,
    )


def _check_hint(action: Any) -> None:
    """Raise ValueError if this release does not know a hint's type or version."""
    is_known = action.action_type in (RETAIN, PREFETCH)
    if not is_known or action.action_version != HINT_VERSION:
        raise ValueError(
            f"unknown type or version, expected {RETAIN} or {PREFETCH}, version "
            f"{HINT_VERSION}"
        )


def _with_hint(
    options: RequestOptions,
    payload: Mapping[str, Any],
) -> RequestOptions:
    """Return a request's options, replaced by the options that a hint gives; the labels of both
    are kept.

    :param payload: options of the hint, in the form of ``RequestOptions``.
    """
    own = msgspec.to_builtins(options)
    merged = {**own, **payload}
    hint_labels = payload.get("labels", {})
    merged["labels"] = {**options.labels, **hint_labels}
    # keep the tenant if the hint gives null: it must not move a request to the default tenant
    if merged["tenant"] is None:
        merged["tenant"] = options.tenant
    return RequestOptions.parse({REQUEST_PARAMETER: merged})


class RequestLoads:
    """Loads of one unfinished request, and their results. Methods take the engine's keys.

    :param position: returns the tokens of the request up to the end of a key's chunk; None: not
        known.
    """

    def __init__(self, position: Position) -> None:
        self.decision: LoadDecision | None = None
        """Whether the request loads what the store holds; None: not decided yet."""
        self.are_elsewhere = False
        """Whether another store of the engine is expected to load the request's chunks faster."""
        self.first_unmeasured: int | None = None
        """Index of the first token of the request whose computation was not counted for the
        engine's speed; at first, the number of tokens that the engine has found or loaded. None:
        the request was not scheduled yet."""
        self._position = position
        self._is_restored: dict[OffloadKey, bool] = {}
        """Results of ended loads. True: the engine uses the chunk instead of computing it. False:
        the load has failed, and the chunk is a miss from now on."""

    @property
    def are_declined(self) -> bool:
        """Whether the request loads nothing from this store, although it holds chunks."""
        decision = self.decision
        is_computed = decision is not None and not decision.num_runs
        return is_computed or self.are_elsewhere

    def end(
        self,
        keys: Sequence[OffloadKey],
        failed: Set[OffloadKey],
    ) -> None:
        """Record the result of a load.

        :param failed: keys that are misses from now on: the engine computes their chunks, and all
            chunks after them, instead of retrying for ever.
        """
        for key in failed:
            self._is_restored[key] = False
        positions: dict[OffloadKey, int] = {}
        for key in keys:
            position = self._position(key)
            # a prewarmed context has no positions: no request uses its chunks yet
            if position is None:
                return
            positions[key] = position
        # The engine uses the chunks before the first failed one. It computes all later chunks, also
        # loaded ones, because a prefix has no gaps.
        failed_positions = [positions[key] for key in failed]
        first_failed = min(failed_positions, default=math.inf)
        for key, position in positions.items():
            if position < first_failed:
                self._is_restored[key] = True

    def has_failed(self, key: OffloadKey) -> bool:
        """Return whether a load of this chunk has failed."""
        return self._is_restored.get(key) is False

    @property
    def restored(self) -> list[OffloadKey]:
        """Keys of the chunks that the engine uses instead of computing them."""
        return [key for key, is_restored in self._is_restored.items() if is_restored]


class LiveRequest(RequestDescription):
    """One unfinished request: its options and stored keys, which may arrive in any order and are
    sorted by position. Methods take the engine's keys, except ``depth``; ``group_keys`` has those
    of the request's tenant.

    :param position: returns the tokens of the request up to the end of a key's chunk; None: not
        known.
    :param group_tokens: for each KV cache group, the tokens of one chunk.
    :param labels: labels that the tier gives all requests; the request's own labels take
        precedence.
    """

    def __init__(
        self,
        req_id: str,
        options: RequestOptions,
        position: Position,
        group_tokens: Sequence[int],
        labels: Mapping[str, str],
    ) -> None:
        all_labels = {**labels, **options.labels}
        super().__init__(len(group_tokens), all_labels)
        self.retention = options.retention
        self.options = options
        self.has_stored = False
        """Whether any chunk of the request was submitted to the store."""
        self.loads = RequestLoads(position)
        """Loads of the request."""
        self.epoch: int | None = None
        """Number of the model weights with which the request began: once they have changed, it
        finds and stores nothing more. None: it never finds or stores anything
        (``GuardedTier.begin_request``)."""
        self.tenant_keys: TenantKeys | None = None
        """Keys of the request's tenant; None: it names none."""
        if options.tenant is not None:
            self.tenant_keys = TenantKeys(options.tenant)
        self.source: object = None
        """vLLM's ``ReqContext`` with which the request began. The tier recognizes the request by
        this object without parsing its options again."""
        self.is_refused = False
        """Whether the given options are invalid (``GivenOptions.is_refused``). ``options`` then
        neither use nor fill the store."""
        self.req_id = req_id
        self.position = position
        self._group_tokens = group_tokens
        self._ends: dict[OffloadKey, int] = {}
        """Key → tokens of the request up to the end of its chunk."""
        self._lists_keys = True
        """Whether the positions of all stored chunks are known: then contexts list their keys."""
        self._is_long: bool | None = None
        """Whether the request has ``min_tokens``; None: not known yet."""

    @property
    def context(self) -> ReqContext:
        """The request as the persistent tier takes it; without a description, which lists its keys,
        if the positions of some stored chunks are unknown."""
        description = self if self._lists_keys else None
        tenant = self.options.tenant
        return ReqContext(self.req_id, description=description, tenant=tenant)

    def is_of(self, given: GivenOptions) -> bool:
        """Return whether a request with these options and the same id may be this one."""
        same_tenant = given.options.tenant == self.options.tenant
        return same_tenant and given.is_refused == self.is_refused

    def depth(self, key: OffloadKey) -> int | None:
        """Return how many chunks of its group come before the chunk of a key of the store; None:
        not known."""
        end = self._ends.get(key)
        if end is None:
            return None
        group = get_offload_group_idx(key)
        chunks_up_to_end = end // self._group_tokens[group]
        # an end within the first chunk counts as the end of the first chunk
        return max(0, chunks_up_to_end - 1)

    def store_keys(self, keys: Sequence[OffloadKey]) -> list[OffloadKey]:
        """Return the keys of the request's tenant for these keys of the engine."""
        of_tenant = self.tenant_keys
        if of_tenant is None:
            return list(keys)
        return [of_tenant[key] for key in keys]

    def must_store(
        self,
        keys: Sequence[OffloadKey],
        min_tokens: int,
    ) -> bool:
        """Return whether the chunks of ``keys`` must be stored: stores are enabled, and a chunk
        ends at token ``min_tokens`` or later, or at an unknown position. The length is checked for
        the request's first keys only.
        """
        if not self.options.store:
            return False
        # decide once only: without its first chunks, later ones could not be restored
        if self._is_long is None:
            self._is_long = min_tokens == 0 or self._may_reach(keys, min_tokens)
        return self._is_long

    def _may_reach(
        self,
        keys: Sequence[OffloadKey],
        min_tokens: int,
    ) -> bool:
        """Return whether a chunk ends at token ``min_tokens`` or later, or may do so, because its
        position is not known."""
        for key in keys:
            end = self.position(key)
            if end is None or end >= min_tokens:
                return True
        return False

    def add_stored(
        self,
        keys: Sequence[OffloadKey],
        store_keys: Sequence[OffloadKey],
    ) -> None:
        """Record that the chunks of ``keys`` are being stored, so that ``context`` lists them. Once
        the position of any stored chunk is unknown, it lists no chunks at all.

        :param store_keys: the same chunks' keys in the store, which the context lists.
        """
        self.has_stored = True
        if not self._lists_keys:
            return
        for key, store_key in zip(keys, store_keys, strict=True):
            # skip a chunk that was stored before: vLLM may offer a chunk of a request again
            if store_key in self._ends:
                continue
            end = self.position(key)
            if end is None:
                # list no keys, because a list with gaps would not be a context
                self._lists_keys = False
                return
            self._ends[store_key] = end
            group = get_offload_group_idx(key)
            self.group_keys[group].append(store_key)
            self.num_tokens = max(self.num_tokens, end)

    def end(self) -> ReqContext:
        """Return the request's context with the keys of each group sorted by position."""
        for keys in self.group_keys:
            keys.sort(key=self._ends.__getitem__)
        return self.context
