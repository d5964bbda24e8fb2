"""Typed configuration, and the plug-ins that it names. Errors name the field, the value and the
expected value."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, Literal, TypeVar, get_args, get_origin
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit

import msgspec

from persistkv.errors import ConfigurationError, MissingOptionError

T = TypeVar("T")
OptionsT = TypeVar("OptionsT", bound=msgspec.Struct)

# 4 KiB: the page size of all supported platforms and the alignment that O_DIRECT requires
PAGE_BYTES = 4 << 10
# 256 MiB: bound on the memory that a block of an untrusted file can claim
MAX_BLOCK_BYTES = 256 << 20
MAX_PACK_BYTES = 64 << 20  # 64 MiB: maximum raw bytes of a pack

# bytes by unit, with the names of coreutils: 5G means 5GiB, and 5GB is less
_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGTP", start=1):
    for _unit in (f"{_letter}iB", f"{_letter}i", _letter):
        _UNITS[_unit] = 1 << (10 * _power)
    _UNITS[f"{_letter}B"] = 1000**_power
_TYPE_NAMES = MappingProxyType(
    {
        "array": "a list",
        "bool": "true or false",
        "float": "a number",
        "int": "an integer",
        "null": "no value",
        "object": "a mapping",
        "str": "text",
    }
)
# flags as text that msgspec's lax mode does not convert
_FLAGS = MappingProxyType({"yes": True, "on": True, "no": False, "off": False})
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", re.ASCII)
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGTP]?i?B?)\s*", re.ASCII)


def parse_size(value: int | str, *, name: str) -> int:
    """Return the bytes of a size such as ``100GiB``, ``512 MiB``, ``5G`` or ``4096``. 1 KiB, 1 Ki
    and 1 K are 1024 bytes, 1 KB is 1000.

    :param name: name of the setting, for the error.
    :raises ConfigurationError: if the value is no size, or not positive.
    """
    expected = "a positive size such as 512MiB or 100GiB"
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is None or match[2] not in _UNITS:
            raise ConfigurationError(name, value, expected)
        amount, unit = match.groups()
        size = int(Decimal(amount) * _UNITS[unit])
    else:
        size = value
    # refuse a bool, which ``isinstance`` counts as an int
    if not isinstance(size, int) or isinstance(size, bool) or size <= 0:
        raise ConfigurationError(name, value, expected)
    return size


def parse_duration(value: str, *, name: str) -> float:
    """Return the seconds of a duration such as ``30s``, ``5m``, ``12h`` or ``7d``.

    :param name: name of the setting, for the error.
    :raises ConfigurationError: if the text is no duration, or not positive.
    """
    seconds = 0.0  # for text that is no duration; the check below refuses it
    match = _DURATION.fullmatch(value)
    if match is not None:
        amount, unit = match.groups()
        seconds = float(Decimal(amount) * _SECONDS[unit])
    if not 0 < seconds < math.inf:
        raise ConfigurationError(
            name,
            value,
            "a positive duration with its unit (s, m, h or d), such as 30s, 12h or 7d",
        )
    return seconds


def exact_size(num_bytes: int) -> str:
    """Return a size as ``parse_size`` reads it, without rounding: ``5GiB``, ``1536MiB``."""
    for unit in ("PiB", "TiB", "GiB", "MiB", "KiB"):
        if num_bytes % _UNITS[unit] == 0:
            return f"{num_bytes // _UNITS[unit]}{unit}"
    return f"{num_bytes}B"


def exact_duration(seconds: float) -> str:
    """Return a duration as ``parse_duration`` reads it, without rounding: ``7d``, ``90s``."""
    for letter in ("d", "h", "m"):
        if seconds % _SECONDS[letter] == 0:
            return f"{seconds / _SECONDS[letter]:g}{letter}"
    return f"{seconds:g}s"


def one_of(name: object, known: Iterable[str]) -> str:
    """Return the text for an error about an unknown name: the known names, and which of them the
    given name resembles."""
    names = sorted(known)
    expected = f"one of {', '.join(names) or 'none'}"
    if isinstance(name, str):
        similar = get_close_matches(name, names)
        if similar:
            expected += f"; did you mean {' or '.join(similar)}?"
    return expected


def parse_durability(text: str) -> float | None:
    """Parse the durability level; return the interval in seconds, or None for ``commit``.

    ``commit`` (None): store jobs are cut into packs of at most 32 MiB, and packs of 4 MiB and more
    are written at once. In a local store, their blocks are durable when the store job ends; in a
    remote store, the job may end earlier. The blocks of smaller packs are copied, and their write
    begins when their request ends, when 16 MiB of the request wait, or at the age
    ``StoreOptions.max_age_s``, whichever is first.

    ``interval:5s`` (5.0): accepted blocks wait until the oldest is 5 s old; then one write of all
    of them begins. A request counts as persisted, and lookups find its blocks, only once they are
    durable.

    At both levels, blocks are written earlier on ``flush`` or if waiting blocks fill half of their
    memory. A crash of the store's host or the machine loses accepted blocks whose write has not
    ended, and nothing else.

    :raises ConfigurationError: the text is neither.
    """
    if text == "commit":
        return None
    kind, _, interval = text.partition(":")
    if kind == "interval":
        with suppress(ConfigurationError):
            return parse_duration(interval, name="durability")
    raise ConfigurationError(
        "durability", text, "commit, or interval:5s for any positive duration"
    )


def store_url(store: str | Path) -> str:
    """Return the URL of an LMDB store given by its path: absolute, with ``~`` replaced by the home
    directory. Text is returned unchanged: ``StoreUrl.parse`` accepts URLs and paths.
    """
    if isinstance(store, Path):
        return f"lmdb://{quote(str(store.expanduser().absolute()))}"
    return store


_URL_FORM = (
    "scheme://location?option=value or an absolute path, e.g. "
    "lmdb:///var/cache/kv?capacity=100GiB"
)


@dataclass(frozen=True)
class StoreUrl:
    """Parsed URL of a store: ``lmdb:///var/kv?capacity=100GiB`` has a scheme, a location and
    options."""

    scheme: str
    """Name of the backend, e.g. ``lmdb``."""
    location: str
    """Location that the backend opens: a path (``/var/kv``), or bucket and prefix
    (``bucket/prefix``)."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options in the query of the URL: value by name."""

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        """Parse a URL, or the path of an LMDB store: ``/var/kv?capacity=100GiB`` and ``~/kv`` mean
        ``lmdb://`` URLs.

        ``~`` at the beginning of a location is the home directory.

        :raises ConfigurationError: if there is no scheme, no location, user information
            (credentials are not allowed in URLs), a fragment, a repeated option, or a null byte.
        """
        if "\0" in unquote(url):
            raise ConfigurationError("url", url, "no null byte: no path has one")
        if url.startswith(("/", "~")):
            path, mark, query = url.partition("?")
            url = f"lmdb://{quote(os.path.expanduser(path))}{mark}{query}"
        parts = _split_url(url)
        location = unquote(parts.netloc + parts.path)
        _check_url(url, parts, location)
        options = _url_options(parts.query)
        return cls(parts.scheme, os.path.expanduser(location), options)


def with_option(
    url: str,
    name: str,
    value: object,
) -> str:
    """Return a URL with one more option, which the URL must not have yet."""
    mark = "&" if "?" in url else "?"
    return f"{url}{mark}{name}={quote(str(value))}"


def without_options(url: str) -> str:
    """Return a URL without its options, which may name a key file."""
    address, _, _ = url.partition("?")
    return address


def _split_url(url: str) -> SplitResult:
    """Return the parts of a URL; raise ConfigurationError if it cannot be divided."""
    try:
        return urlsplit(url)
    except ValueError as error:
        # show the scheme only, because the rest may contain credentials
        scheme = url.partition("://")[0]
        expected = f"{_URL_FORM} ({error})"
        raise ConfigurationError("url", f"{scheme}://…", expected) from None


def _check_url(
    url: str,
    parts: SplitResult,
    location: str,
) -> None:
    """Raise ConfigurationError for a URL that ``StoreUrl.parse`` refuses."""
    if "@" in parts.netloc:
        raise ConfigurationError(
            "url",
            f"{parts.scheme}://…",
            "no user information: URLs must not contain credentials",
        )
    # suggest an absolute path for text without a scheme, such as a relative path
    if url and "://" not in url:
        path = os.path.abspath(url)
        raise ConfigurationError("url", url, f"{_URL_FORM}; as a path: {path}")
    if not parts.scheme or not location:
        raise ConfigurationError("url", url, _URL_FORM)
    # ``parts`` does not show an empty fragment
    if parts.fragment or url.endswith("#"):
        raise ConfigurationError("url", url, "no fragment: in a path, # is written %23")


def _url_options(query: str) -> dict[str, str]:
    """Return the options in the query of a URL; raise ConfigurationError if one is repeated."""
    options: dict[str, str] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        if name in options:
            raise ConfigurationError(f"url option {name}", value, "each option once")
        options[name] = value
    return options


def convert_options(
    kind: type[OptionsT],
    options: Mapping[str, Any],
    *,
    where: str,
    others: Iterable[str] = (),
) -> OptionsT:
    """Build the typed options ``kind`` from untyped ones; strings are converted to numbers and
    flags.

    :param where: owner of the options, for errors, such as ``offloading``.
    :param others: names of options that are valid in the same place without being part of ``kind``;
        the error about an unknown option lists them, too.
    :raises ConfigurationError: if an option is unknown, missing or invalid; the error contains
        ``where`` and its name.
    """
    fields = msgspec.structs.fields(kind)
    known = {option.encode_name: option for option in fields}
    values = {}
    for name, value in options.items():
        if name not in known:
            expected = one_of(name, {*known, *others})
            raise ConfigurationError(f"{where} option {name}", value, expected)
        values[name] = _plain_boolean(value)
    for name, option in known.items():
        if option.required and name not in options:
            raise MissingOptionError(
                f"{where} option {name}", "a value: there is no default"
            )
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        cause = error.__cause__
        if isinstance(cause, ConfigurationError):
            # a check of the struct has raised this error, which has a better message
            raise cause from None
        raise _option_error(error, known, options, where) from None


def _option_error(
    error: msgspec.ValidationError,
    known: Mapping[str, msgspec.structs.FieldInfo],
    options: Mapping[str, Any],
    where: str,
) -> ConfigurationError:
    """Return msgspec's error in the words of options."""
    # an example of msgspec's text: "Expected `int`, got `str` - at `$.name[0].field`"
    message, _, place = str(error).partition(" - at ")
    path = place.partition("$.")[2].rstrip("`")
    # take the option itself, because the path may lead to a part of its value
    name = re.split(r"[.\[]", path)[0]
    expected = message
    if name in known:
        expected = _expected(message, known[name].type)
    if path != name:
        expected += f" at {path}"
    return ConfigurationError(f"{where} option {name}", options.get(name), expected)


def _expected(message: str, kind: Any) -> str:
    """Return the expected value in words: the choices of a Literal ``kind``, else what msgspec's
    message names."""
    choices: list[Any] = []
    # the choices of an optional Literal are one level deeper, in a part of the union
    for part in (kind, *get_args(kind)):
        if get_origin(part) is Literal:
            choices += get_args(part)
    if choices:
        return f"one of {', '.join(map(str, choices))}"
    # an example of ``message``: "Expected `int | null`, got `str`"
    expected, _, _ = message.removeprefix("Expected ").partition(", got ")
    types = expected.replace("`", "").split(" | ")
    return " or ".join(map(_type_in_words, types))


def _type_in_words(type_name: str) -> str:
    """Return msgspec's name of a type in words: ``an integer`` for ``int``. Conditions that follow
    the name stay as they are: ``an integer >= 1`` for ``int >= 1``."""
    word = type_name.partition(" ")[0]
    return _TYPE_NAMES.get(word, word) + type_name.removeprefix(word)


def _plain_boolean(value: Any) -> Any:
    """Return the flag for ``yes``, ``on``, ``no`` and ``off``, which msgspec's lax mode lacks, else
    ``value``."""
    if not isinstance(value, str):
        return value
    return _FLAGS.get(value, value)


class Registry(Generic[T]):
    """Subclasses of ``base`` by name: built-in ones, and plug-ins of an entry-point group.

    Plug-ins are looked up on each call and imported only when they are requested. They cannot
    replace a built-in class.

    :param field: the setting that holds the name, for errors.
    """

    def __init__(
        self,
        group: str,
        field: str,
        base: type[Any],
        built_in: Mapping[str, type[T]] = MappingProxyType({}),
    ) -> None:
        self._group = group
        self._field = field
        self._base = base
        self._built_in = built_in

    def names(self) -> list[str]:
        """Return the names of the built-in classes and of the installed plug-ins, sorted."""
        return sorted({*self._built_in, *self._plugins()})

    def get(self, name: object) -> type[T]:
        """Return the class of a name from the user's configuration.

        :raises ConfigurationError: no such name (the error lists the known ones), a plug-in that
            cannot be imported (the error names its distribution), or one that is no subclass of the
            base class.
        """
        if isinstance(name, str):
            if name in self._built_in:
                return self._built_in[name]
            point = self._plugins().get(name)
            if point is not None:
                return self._imported(point)
        known = self.names()
        expected = one_of(name, known) if known else f"a plug-in of {self._group}"
        raise ConfigurationError(self._field, name, expected)

    def _imported(self, point: EntryPoint) -> type[T]:
        """Return the class of a plug-in; raise as ``get`` does."""
        distribution = point.dist.name if point.dist else "an unnamed distribution"
        source = f"{point.value} of {distribution}"
        try:
            found: Any = point.load()
        except Exception as error:
            expected = (
                f"a plug-in that can be imported; {source} raised "
                f"{type(error).__name__}: {error}"
            )
            raise ConfigurationError(self._field, point.name, expected) from error
        if not (isinstance(found, type) and issubclass(found, self._base)):
            expected = f"a plug-in; {source} is no {self._base.__name__}"
            raise ConfigurationError(self._field, point.name, expected)
        return found

    def _plugins(self) -> dict[str, EntryPoint]:
        """Return the installed plug-ins by name; none is imported yet."""
        points = entry_points(group=self._group)
        return {point.name: point for point in points}


class GroupLayout(msgspec.Struct, frozen=True):
    """The bytes of a primary tier row that a block of one KV cache group uses."""

    ranges: tuple[tuple[int, int], ...]
    """(offset, length) in bytes, ascending, not overlapping. Bytes between them are stale and never
    persisted."""

    @classmethod
    def of_bytes(cls, num_bytes: int) -> GroupLayout:
        """Return the layout of blocks that use the first bytes of a row."""
        whole = (0, num_bytes)
        return cls((whole,))

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of this group, without the gaps between its ranges."""
        return sum(length for _, length in self.ranges)

    def check(self, name: str, row_stride: int) -> None:
        """Raise ConfigurationError, with the field ``name``, unless the ranges are valid for rows
        of ``row_stride`` bytes."""
        if not self.ranges:
            raise ConfigurationError(name, self.ranges, "at least one range")
        end = 0
        for offset, length in self.ranges:
            if offset < end or length <= 0 or offset + length > row_stride:
                raise ConfigurationError(
                    name, self.ranges, f"ascending ranges within {row_stride} bytes"
                )
            end = offset + length
        if self.block_bytes > MAX_BLOCK_BYTES:
            raise ConfigurationError(
                name,
                self.ranges,
                f"at most {MAX_BLOCK_BYTES} bytes: use smaller blocks",
            )


class VectorLayout(msgspec.Struct, frozen=True):
    """Positions of one KV cache group's numbers in a row. A cell is one part (keys or values) of
    one head of one layer in one worker; it contains one vector for each token of the block.
    """

    offset: int
    """Offset in bytes of the first vector of the first cell."""
    cells: tuple[tuple[int, int], ...]
    """(count, stride in bytes) of each dimension that selects a cell."""
    tokens: tuple[tuple[int, int], ...]
    """(count, stride in bytes) of each dimension that selects a token of the block."""
    length: int
    """Count of the numbers in a vector; they are consecutive."""


class NumberLayout(msgspec.Struct, frozen=True):
    """Positions and dtype of the numbers in a row. Needed to compare blocks whose numbers may
    differ by rounding."""

    dtype: Literal["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]
    groups: tuple[VectorLayout, ...]
    """One entry per KV cache group."""


class RowLayout(msgspec.Struct, frozen=True):
    """The geometry of the primary tier's rows.

    :raises ConfigurationError: at construction, naming the invalid field.
    """

    row_stride: int
    """Bytes from one row to the next, a multiple of 4 KiB."""
    groups: tuple[GroupLayout, ...]
    """One entry per KV cache group."""
    numbers: NumberLayout | None = None
    """Positions and dtype of the numbers in a row; None: unknown."""

    def __post_init__(self) -> None:
        if self.row_stride <= 0 or self.row_stride % PAGE_BYTES:
            raise ConfigurationError(
                "row_stride", self.row_stride, "a positive multiple of 4096 bytes"
            )
        if not self.groups:
            raise ConfigurationError(
                "groups", self.groups, "at least one KV cache group"
            )
        for index, group in enumerate(self.groups):
            group.check(f"groups[{index}].ranges", self.row_stride)


@dataclass(frozen=True)
class OffloadingConfig:
    """Description of an engine for a secondary tier: its identity, blocks and rows.

    :raises ConfigurationError: at construction, if a number is not positive; the error names it.
    """

    identity: Mapping[str, Any]
    """Everything that must match for KV bytes to be valid, as JSON values
    (``persistkv.storage.identity``)."""
    block_size: int
    """Tokens in one offloaded block."""
    layout: RowLayout
    """The bytes of each group in a row."""
    num_blocks: int
    """Rows of the primary tier."""
    region_fds: tuple[int, ...] = ()
    """Descriptors of the files that are the primary tier's memory, one after the other, which a
    host process maps. Empty: not available, so a tier cannot use a host process."""
    enable_events: bool = False
    """Whether the engine uses the events of the tier's ``take_events``; False: the tier may return
    none."""
    windows: tuple[int | None, ...] = ()
    """For each KV cache group, the number of tokens at the end of a prefix whose blocks a load
    needs; None: all. Empty: each group needs all blocks. For estimates only."""

    def __post_init__(self) -> None:
        if self.block_size <= 0:
            raise ConfigurationError(
                "block_size", self.block_size, "a positive number of tokens"
            )
        if self.num_blocks <= 0:
            raise ConfigurationError(
                "num_blocks", self.num_blocks, "a positive number of rows"
            )
