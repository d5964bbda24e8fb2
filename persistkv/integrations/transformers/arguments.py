"""Arguments of the engine that callers get wrong. Errors name the argument, its value and the valid
range; nothing is converted silently."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from numbers import Real
from typing import Any, ParamSpec, TypedDict, TypeVar

import torch

from persistkv.base import Retention, check_labels
from persistkv.config import one_of
from persistkv.errors import ConfigurationError, first_line
from persistkv.integrations.request_options import RequestOptions
from persistkv.tenants import request_tenant

P = ParamSpec("P")
T = TypeVar("T")

_POSITIONAL = ("prompt", "max_new_tokens")
"""Arguments of a request that are no ``GenerateOptions``; an error that lists the known names has
them, too."""


class GenerateOptions(TypedDict, total=False):
    """Options of one request, for ``Engine.generate`` and ``Engine.stream``."""

    temperature: float
    """0, the default, chooses the most likely token."""
    top_p: float
    """Draw from the most likely tokens with this total probability; 1.0 by default."""
    top_k: int
    """Draw from this many most likely tokens; 0, the default: no limit."""
    seed: int
    """Seed of the draws; 0 by default."""
    stop_token_ids: Iterable[int]
    """Tokens that end the generation; by default the model's own."""
    salt: str | None
    """Contexts of different salts share no blocks."""
    tenant: str | None
    """Name of the tenant whose request it is, 1 to 128 characters: contexts of different tenants
    share no blocks, on the device and in the tiers. None: the one in ``kv_transfer_params``, else
    the default tenant."""
    labels: Mapping[str, str] | None
    """Stored with the context and shown by tools."""
    load: bool
    """False computes the whole prompt and restores no KV."""
    store: bool
    """False stores no block of this request in the tiers."""
    kv_transfer_params: Mapping[str, Any] | None
    """``RequestOptions`` in the form of vLLM's requests, for an engine behind a server:
    ``{"persistkv": {"load": False, "ttl": "1h"}}``. ``load`` or ``store`` is off if either form
    sets it to False."""


@dataclass(frozen=True)
class RequestArguments:
    """The checked ``GenerateOptions`` of one request, without those of the sampler."""

    stop: frozenset[int] | None
    """Tokens that end the generation; None: the model's own."""
    salt: str | None
    """Contexts of different salts share no blocks; None: no salt."""
    tenant: str | None
    labels: Mapping[str, str]
    load: bool
    store: bool
    parameters: Mapping[str, Any] | None
    """``kv_transfer_params`` as given."""
    retention: Retention

    @classmethod
    def check(cls, options: GenerateOptions, vocabulary: int) -> RequestArguments:
        """Return the arguments in ``options``.

        :param vocabulary: number of token ids.
        :raises ConfigurationError: an option is unknown or invalid.
        """
        check_names(options, (*_POSITIONAL, *GenerateOptions.__annotations__))
        stop = None
        if "stop_token_ids" in options:
            stop = _stop_tokens(options["stop_token_ids"], vocabulary)
        salt = options.get("salt")
        if salt is not None:
            text("salt", salt)
        load = flag("load", options.get("load", True))
        store = flag("store", options.get("store", True))
        parameters = options.get("kv_transfer_params")
        tier_options = RequestOptions.parse(parameters)
        return cls(
            stop=stop,
            salt=salt,
            tenant=request_tenant(options.get("tenant"), parameters),
            # of both forms, all labels count, and ``load`` and ``store`` are off if either says so
            labels={**labels(options.get("labels")), **tier_options.labels},
            load=load and tier_options.load,
            store=store and tier_options.store,
            parameters=parameters,
            retention=tier_options.retention,
        )


def check_names(
    options: Mapping[str, object],
    known: Iterable[str],
) -> None:
    """Raise ConfigurationError if an option is none of the known ones."""
    for name, value in options.items():
        if name not in known:
            raise ConfigurationError(name, value, one_of(name, known))


def checks_names(function: Callable[P, T]) -> Callable[P, T]:
    """Make calls of a function with an unknown keyword raise ConfigurationError, which names the
    known ones, instead of TypeError."""
    known = set(signature(function).parameters) - {"cls"}

    @wraps(function)
    def checked(
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        check_names(options, known)
        return function(*args, **options)

    return checked


def integer(
    name: str,
    value: object,
    least: int,
    most: int | None = None,
) -> int:
    """Return an integer from ``least`` to ``most`` (None: no limit).

    :raises ConfigurationError: the value is no integer, or out of range.
    """
    expected = f"an integer, {least} or more"
    if most is not None:
        expected = f"an integer from {least} to {most}"
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigurationError(name, value, expected) from None
    too_large = most is not None and number > most
    if isinstance(value, bool) or number < least or too_large:
        raise ConfigurationError(name, value, expected)
    return number


def number(
    name: str,
    value: object,
    least: float,
    most: float = math.inf,
    *,
    above: bool = False,
) -> float:
    """Return a number from ``least`` to ``most``.

    :param above: whether ``least`` itself is out of range.
    :raises ConfigurationError: the value is no number, or out of range.
    """
    expected = f"a number above {least:g}" if above else f"a number, {least:g} or more"
    if most < math.inf:
        expected += f", {most:g} at most"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    converted = float(value) if is_number else math.nan  # type: ignore[arg-type]
    in_range = least < converted if above else least <= converted
    # a value that is no number has become NaN, for which all comparisons are false
    if not (in_range and converted <= most):
        raise ConfigurationError(name, value, expected)
    return converted


def flag(name: str, value: object) -> bool:
    """Return a bool; raise ConfigurationError for another type: the text ``"no"`` would count as
    true."""
    if not isinstance(value, bool):
        raise ConfigurationError(name, value, "True or False")
    return value


def choice(
    name: str,
    value: object,
    known: Sequence[str],
) -> None:
    """Raise ConfigurationError if a value is none of the known ones."""
    if value not in known:
        raise ConfigurationError(name, value, f"one of {', '.join(known)}")


def text(name: str, value: object) -> str:
    """Return text; raise ConfigurationError for another type."""
    if not isinstance(value, str):
        raise ConfigurationError(name, value, "text")
    return value


def labels(value: object) -> dict[str, str]:
    """Return the labels of a request, no labels for None; raise ConfigurationError if they are
    invalid."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        expected = 'names and values that are text, such as {"user": "anna"}'
        raise ConfigurationError("labels", value, expected)
    check_labels(value)
    return dict(value)


def _stop_tokens(value: object, vocabulary: int) -> frozenset[int]:
    """Return the tokens that end a generation; raise ConfigurationError if one is no token."""
    expected = f"token ids from 0 to {vocabulary - 1}, such as [2]"
    if not isinstance(value, Iterable) or isinstance(value, str):
        raise ConfigurationError("stop_token_ids", value, expected)
    found = set()
    for token in value:
        try:
            token_id = integer("stop_token_ids", token, least=0, most=vocabulary - 1)
        except ConfigurationError as error:
            expected += f"; {token!r} is none"
            raise ConfigurationError("stop_token_ids", value, expected) from error
        found.add(token_id)
    return frozenset(found)


def dtype(value: object) -> torch.dtype | str:
    """Return the data type of a model: ``auto`` or one of torch, given as such or by its name;
    raise ConfigurationError if it is neither."""
    if value == "auto":
        return "auto"
    found = value
    if isinstance(value, str):
        found = getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        expected = "auto, or a data type of torch such as bfloat16, float16 or float32"
        raise ConfigurationError("dtype", value, expected)
    return found


def device(value: object) -> torch.device:
    """Return a device that torch can use on this machine; raise ConfigurationError if it is
    none."""
    try:
        found: torch.device = torch.device(value)  # type: ignore[call-overload]
        # allocate memory, which fails for a device that this machine lacks
        torch.empty(1, device=found)
    # torch raises exceptions of several classes, AssertionError among them
    except Exception as error:
        reason = first_line(error)
        raise ConfigurationError(
            "device", value, f"a device of this machine, such as cpu ({reason})"
        ) from error
    return found
