"""All exception classes of persistkv, in one shallow tree. Misuse may raise built-in ones such as
KeyError.

Vendor exceptions (LMDB, the operating system, msgspec) are translated once, in the module that
calls the vendor's code. Other modules do not catch them by name.
"""

from __future__ import annotations

import copyreg
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple


class FieldDifference(NamedTuple):
    """One field in which two identities differ."""

    field: str
    """Dotted path of the field, e.g. ``config.rope_theta``."""
    ours: object
    """The requested value; None if only the stored identity has the field."""
    theirs: object
    """The stored value; None if only the requested identity has the field."""

    def __str__(self) -> str:
        return f"{self.field}: {self.ours!r} here, {self.theirs!r} stored"


class PersistKVError(Exception):
    """Base class of the exception classes of persistkv."""

    def __reduce__(self) -> tuple[object, ...]:
        """Make copies and unpickling skip the constructor, whose parameters differ between the
        subclasses."""
        arguments = (type(self), *self.args)
        return copyreg.__newobj__, arguments, self.__dict__  # type: ignore[attr-defined]


class ConfigurationError(PersistKVError, ValueError):
    """A value given by the caller is invalid. Nothing was opened, and no stored data was changed.

    :param field: name of the setting or argument.
    :param expected: the valid values, in words.
    :param message: text of the error; None: a text made of the other three parameters.
    """

    def __init__(
        self,
        field: str,
        value: object,
        expected: str,
        message: str | None = None,
    ) -> None:
        super().__init__(
            message or f"{field}: {value!r} is not valid; expected {expected}"
        )
        self.field = field
        self.value = value
        self.expected = expected


class MissingOptionError(ConfigurationError):
    """A required value was not given: ``what``, such as an option or a command, requires one of
    ``needed``."""

    def __init__(self, what: str, needed: str) -> None:
        super().__init__(what, None, needed, f"{what} requires {needed}")


class FileError(ConfigurationError):
    """A file that the caller named cannot be used; ``action`` is what failed, such as ``read`` or
    ``write``."""

    def __init__(
        self,
        action: str,
        path: Path,
        error: Exception,
    ) -> None:
        reason = str(error)
        if isinstance(error, OSError) and error.strerror:
            # use the reason alone, because ``str`` repeats the path and adds the error number
            reason = error.strerror
        where = "standard output" if str(path) == "-" else str(path)
        super().__init__(
            action, str(path), reason, f"cannot {action} {where}: {reason}"
        )


class EngineClosedError(PersistKVError):
    """The engine was closed before this call."""

    def __init__(self) -> None:
        super().__init__("the engine is closed")


class PromptTooLongError(ConfigurationError):
    """The prompt with its new tokens exceeds the model's context length or the device cache.
    Nothing was run.

    :param tokens: number of tokens of prompt and answer together.
    :param limit: maximum number of tokens of both together.
    :param option: option of the engine that raises the limit, with its smallest sufficient value
        ``needed``; None: the limit is the model's context length.
    """

    def __init__(
        self,
        tokens: int,
        limit: int,
        option: str | None = None,
        needed: int | None = None,
    ) -> None:
        explanation = "the model's context length"
        if option is not None:
            explanation = f"or {option}={needed}"
        super().__init__(
            "token_ids", f"{tokens} tokens", f"at most {limit} tokens, {explanation}"
        )
        self.tokens = tokens
        self.limit = limit
        self.option = option
        self.needed = needed


class UnsupportedModelError(PersistKVError):
    """The model uses a kind of cache that persistkv does not support; the message names it."""


class UnsupportedReleaseError(PersistKVError):
    """The installed release of a package lacks an interface that persistkv uses; the message names
    the release."""

    def __init__(
        self,
        package: str,
        release: str,
        problem: str,
    ) -> None:
        super().__init__(
            f"persistkv does not support {package} {release}: {problem}; install a tested release"
        )
        self.package = package
        self.release = release
        self.problem = problem


class RegionError(PersistKVError):
    """The shared memory of the primary tier is not available, or was released; the message contains
    the reason."""


class IdentityMismatchError(PersistKVError):
    """``strict_identity`` is set and the store contains only other identities.

    :param differences: fields in which the requested identity differs from the most similar stored
        one.
    """

    def __init__(self, url: str, differences: Sequence[FieldDifference]) -> None:
        lines = "; ".join(str(difference) for difference in differences)
        super().__init__(
            f"{url} holds no namespace of this identity; the nearest differs in {lines}"
        )
        self.url = url
        self.differences = tuple(differences)


class StoreError(PersistKVError):
    """An operation of a store failed. Everything that was durable before remains durable."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened or reached: for example no permission, another file at its path,
    or no such host."""


class ProcessIdInUseError(StoreUnavailableError):
    """A process in another PID namespace with the same PID uses the store. Open it from another
    process."""


class StoreBusyError(StoreError):
    """Another process or thread held the store's lock longer than a commit takes. Nothing was
    changed; retry later."""


class StoreTimeoutError(StoreError):
    """A call did not end before its deadline. It continues, and may still take effect.

    :param seconds: the time limit of the call.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the store did not answer within {seconds:g} s")
        self.seconds = seconds


class StoreFullError(StoreError):
    """A write did not fit the capacity or the disk, even after eviction; its transaction was rolled
    back completely."""


class QuotaExceededError(StoreError):
    """Content of a tenant did not fit its quota, even after the eviction of its other content.
    Nothing was written, and content of other tenants is not affected.

    :param num_bytes: bytes of the content that did not fit.
    :param quota: quota of the tenant in bytes.
    """

    def __init__(
        self,
        tenant: str,
        num_bytes: int,
        quota: int,
    ) -> None:
        super().__init__(
            f"{num_bytes} bytes of the tenant {printable(tenant)!r} do not fit its quota of "
            f"{quota} bytes beside what is pinned or part of the same request"
        )
        self.tenant = tenant
        self.num_bytes = num_bytes
        self.quota = quota


class TenantForgottenError(StoreError):
    """Tenants were forgotten after the caller had accepted their content. Nothing was written; drop
    the content.

    :param tenants: names of the forgotten tenants.
    """

    def __init__(self, tenants: Collection[str]) -> None:
        super().__init__("content of a tenant that was forgotten meanwhile is dropped")
        self.tenants = frozenset(tenants)


class CorruptStoreError(StoreError):
    """The catalogue of a store (tables of packs, manifests, free space, totals) is invalid. Nothing
    was changed."""


class CorruptPackError(StoreError):
    """A pack, a frame or a manifest is invalid. None of its content is used.

    :param field: the invalid part, such as ``frame checksum``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class HostError(PersistKVError):
    """The host of a store does not start or answer, is closed, or belongs to the process that
    forked this one."""


class MissingExtraError(PersistKVError, ImportError):
    """A package that an optional part of persistkv requires is not installed."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f'{package} is not installed: pip install "persistkv[{extra}]"'
        )
        self.package = package
        self.extra = extra


def first_line(error: Exception) -> str:
    """Return the first line of an error's text without unprintable characters; the name of its
    class if it has no text."""
    text = str(error).strip() or type(error).__name__
    line, _, _ = text.partition("\n")
    return printable(line)


def printable(text: str) -> str:
    """Return the text with every unprintable character as its Python escape sequence, such as
    ``\\x1b``.

    Unprintable are control characters (C0, C1, DEL), line ends, and format characters such as
    bidirectional overrides and zero-width spaces. A terminal obeys some of them, and others hide or
    imitate text.
    """
    if text.isprintable():
        return text
    shown = []
    for char in text:
        if char.isprintable():
            shown.append(char)
        else:
            escaped = char.encode("unicode_escape")
            shown.append(escaped.decode())
    return "".join(shown)
