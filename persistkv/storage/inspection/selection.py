"""Conditions that select requests."""

from __future__ import annotations

import time
from collections.abc import Iterable

import msgspec

from persistkv.config import parse_duration, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage.format.manifest import RequestManifest
from persistkv.storage.stats import RequestUse


class Selection(msgspec.Struct, frozen=True):
    """Conditions on requests. A request must fulfil all of them; the default selects every
    request."""

    labels: tuple[tuple[str, str | None], ...] = ()
    """Labels that the request must have, as (name, value); a value of None: any value."""
    made_before: float | None = None
    """Latest time of creation, exclusive: seconds since the epoch; None: no bound."""
    made_after: float | None = None
    """Earliest time of creation, exclusive: seconds since the epoch; None: no bound."""
    more_bytes_than: int | None = None
    """Lower bound on the raw bytes of a request, exclusive; None: no bound."""
    fewer_bytes_than: int | None = None
    """Upper bound on the raw bytes of a request, exclusive; None: no bound."""
    never_hit: bool = False
    """Only requests that were never used after they were stored."""
    expired: bool = False
    """Only requests whose ttl has passed, and that no commit has deleted yet."""

    @property
    def needs_use(self) -> bool:
        """Whether ``takes`` depends on the use of a request."""
        return self.never_hit or self.expired

    @classmethod
    def parse(
        cls,
        labels: Iterable[str] | None = None,
        older_than: str | None = None,
        newer_than: str | None = None,
        larger_than: str | None = None,
        smaller_than: str | None = None,
        *,
        never_hit: bool = False,
        expired: bool = False,
    ) -> Selection:
        """Return the selection that options of a command line describe.

        :raises ConfigurationError: an option is invalid; the error names it.
        """
        return cls(
            labels=tuple(_label(text) for text in labels or ()),
            made_before=_time_before(older_than, "--older-than"),
            made_after=_time_before(newer_than, "--newer-than"),
            more_bytes_than=_size(larger_than, "--larger-than"),
            fewer_bytes_than=_size(smaller_than, "--smaller-than"),
            never_hit=never_hit,
            expired=expired,
        )

    def takes(
        self,
        manifest: RequestManifest,
        use: RequestUse | None = None,
        store_ttl_s: float | None = None,
    ) -> bool:
        """Return whether a request fulfils all conditions.

        :param use: use of the request. None: the use is unknown, and the request fulfils neither
            ``never_hit`` nor ``expired``.
        :param store_ttl_s: ttl of the store in seconds; None: the store has none.
        """
        # an unknown use selects nothing: prune must not delete requests whose use is unknown
        if self.never_hit and (use is None or use.reused):
            return False
        if self.expired and not _has_expired(manifest, use, store_ttl_s):
            return False
        return self._takes_time_and_size(manifest) and self._takes_labels(manifest)

    def _takes_time_and_size(self, manifest: RequestManifest) -> bool:
        """Return whether the time and the size of a request are within the bounds."""
        created = manifest.created
        size = manifest.raw_bytes
        if self.made_before is not None and created >= self.made_before:
            return False
        if self.made_after is not None and created <= self.made_after:
            return False
        if self.more_bytes_than is not None and size <= self.more_bytes_than:
            return False
        return self.fewer_bytes_than is None or size < self.fewer_bytes_than

    def _takes_labels(self, manifest: RequestManifest) -> bool:
        """Return whether a request has all labels of the selection."""
        for name, value in self.labels:
            if name not in manifest.labels:
                return False
            # None selects every value of the label
            if value is not None and value != manifest.labels[name]:
                return False
        return True


def _has_expired(
    manifest: RequestManifest,
    use: RequestUse | None,
    store_ttl_s: float | None,
) -> bool:
    """Return whether the request's own ttl or the store's has passed; False if its use is
    unknown."""
    if use is None:
        return False
    expires = use.expires(manifest.ttl_s, store_ttl_s)
    return expires is not None and expires <= time.time()


def _time_before(age: str | None, name: str) -> float | None:
    """Return the time ``age`` ago, in seconds since the epoch.

    :param age: a duration such as ``7d``; None: no bound, which returns None.
    :param name: option that gives the age, for errors.
    """
    if age is None:
        return None
    age_s = parse_duration(age, name=name)
    return time.time() - age_s


def _size(size: str | None, name: str) -> int | None:
    return None if size is None else parse_size(size, name=name)


def _label(text: str) -> tuple[str, str | None]:
    """Return the condition that the option ``--label`` describes, as in ``Selection.labels``."""
    # ``NAME=`` asks for an empty value, ``NAME`` for any value
    name, equals, value = text.partition("=")
    if not name:
        raise ConfigurationError("--label", text, "NAME or NAME=VALUE")
    return name, value if equals else None
