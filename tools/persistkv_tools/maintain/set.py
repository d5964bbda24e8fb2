"""``persistkv set``: show and change a store's policy."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from persistkv.config import StoreUrl, exact_duration, parse_duration, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.inspection.requests import with_uses
from persistkv.storage.policy import Policy
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    Positional,
    add_flag,
    add_yes,
    confirm,
    ensure_consent,
)
from persistkv_tools.options import opened

_NONE = "none"


class Consequences(msgspec.Struct, frozen=True):
    """Consequences of a new policy for the content of a store."""

    disk_bytes: int
    """Bytes that the store takes on disk now."""
    evicted_bytes: int
    """Part of ``disk_bytes`` that the next commits evict to fit a new capacity."""
    expiring_requests: int
    """Requests that the next commits delete, because they are older than a new ttl."""
    requests: int
    missing_disk_bytes: int
    """Bytes that a local disk lacks for the store to grow to the new capacity."""


_VALUES = Positional(
    "values",
    "NAME=VALUE",
    "capacity=200GiB, ttl=7d or ttl=none. By default, show both.",
    is_many=True,
)


def set_(url: str, values: list[str], *, dry_run: bool, yes: bool, json: bool) -> None:
    """Show or change a store's capacity and ttl. Engines may use the store meanwhile.

    Options in a URL do not change an existing store. This command does, after it has shown the
    consequences.

    Example: persistkv set lmdb:///var/cache/kv capacity=200GiB ttl=30d
    """
    with opened(url) as backend:
        before = backend.policy()
        after = _changed(before, values)
        found = _consequences(backend, url, before, after)
        # a local store evicts in the transaction that changes its policy
        is_local = not backend.capabilities.remote
    if not json:
        _print(before, after, found, is_local=is_local)
    done = False
    if after != before and not dry_run:
        ensure_consent("set", "--yes or --dry-run", yes=yes, json=json)
        if yes or confirm("Change the policy?"):
            with closing(open_backend(url)) as backend:
                backend.set_policy(after)
            done = True
    if json:
        policies = {"before": before, "after": after}
        render.print_json(
            {"url": url, **policies, "consequences": found, "changed": done}
        )
    elif done:
        applied = is_local and after.ttl_s == before.ttl_s
        later = "; engines apply it with their next commit"
        render.say("changed" if applied else f"changed{later}")


def _add_options(parser: ArgumentParser) -> None:
    add_flag(parser, "--dry-run", "Only show the consequences.")
    add_yes(parser)


COMMAND = Command(set_, (URL, _VALUES), _add_options)


def _changed(policy: Policy, values: list[str]) -> Policy:
    """Return the policy with the values of ``NAME=VALUE`` texts; raise ConfigurationError if one is
    invalid."""
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError("set", text, "NAME=VALUE, such as capacity=200GiB")
        if name == "capacity":
            policy = replace(policy, capacity=parse_size(value, name="capacity"))
        elif name == "ttl":
            policy = replace(policy, ttl_s=_parse_ttl(value))
        elif name != "placement":
            raise ConfigurationError(
                "set", text, "one of capacity=SIZE, ttl=DURATION and ttl=none"
            )
        elif value != policy.placement:
            expected = (
                f"{policy.placement}, fixed at creation; persistkv copy copies a store "
                f"into a new one"
            )
            raise ConfigurationError("placement", value, expected)
    return policy


def _consequences(
    backend: Backend, url: str, before: Policy, after: Policy
) -> Consequences:
    stats = backend.stats()
    grows = 0 if after.capacity is None else after.capacity - stats.disk_bytes
    location = Path(StoreUrl.parse(url).location)
    missing = 0
    # only a local disk is this machine's to measure
    if after.capacity != before.capacity and location.is_dir():
        status = os.statvfs(location)
        missing = max(0, grows - status.f_bavail * status.f_frsize)
    expiring = 0
    if after.ttl_s not in (None, before.ttl_s):
        expiring = _expiring(backend, after)
    return Consequences(
        disk_bytes=stats.disk_bytes,
        evicted_bytes=max(0, -grows),
        expiring_requests=expiring,
        requests=stats.requests,
        missing_disk_bytes=missing,
    )


def _expiring(backend: Backend, policy: Policy) -> int:
    """Return the number of requests that are older than the ttl of a policy."""
    now = time.time()
    expiring = 0
    for namespace in backend.namespaces():
        manifests = backend.catalogue(namespace.id).manifests()
        for _, use in with_uses(backend, namespace.id, manifests):
            # requests with a ttl of their own expire by it, whatever the store's is
            if use is None:
                continue
            expires = use.expires(own_ttl_s=None, store_ttl_s=policy.ttl_s)
            if expires is not None and expires < now:
                expiring += 1
    return expiring


def _print(
    before: Policy, after: Policy, found: Consequences, *, is_local: bool
) -> None:
    sizes = [_size(before.capacity), _size(after.capacity)]
    ttls = [_duration(before.ttl_s), _duration(after.ttl_s)]
    rows = {
        "capacity": " → ".join(dict.fromkeys(sizes)),
        "ttl": " → ".join(dict.fromkeys(ttls)),
        "placement": before.placement or "-",
        "on disk": render.format_size(found.disk_bytes),
    }
    render.show_pairs(rows)
    if found.evicted_bytes:
        size = render.format_size(found.evicted_bytes)
        when = "at once"
        if not is_local:
            when = "by the next commit of an engine, or by persistkv prune --keep-size"
        render.say(f"about {size} will be evicted {when}, least recently used first")
        if not is_local:
            render.say("its bytes are freed an hour later, or by the daily sweep")
    if found.expiring_requests:
        of = render.count(found.requests, "request")
        render.say(
            f"{found.expiring_requests:,} of {of} will expire: they were stored longer ago "
            "than the new ttl"
        )
    if found.missing_disk_bytes:
        render.say(
            f"this capacity needs {render.format_size(found.missing_disk_bytes)} more than the "
            f"disk has free"
        )


def _size(capacity: int | None) -> str:
    return _NONE if capacity is None else render.format_size(capacity)


def _duration(seconds: float | None) -> str:
    return _NONE if seconds is None else exact_duration(seconds)


def _parse_ttl(value: str) -> float | None:
    """Return the seconds of a ttl; None: requests never expire."""
    if value == _NONE:
        return None
    try:
        return parse_duration(value, name="ttl")
    except ConfigurationError as error:
        expected = f"{_NONE}, or {error.expected}"
        raise ConfigurationError("ttl", value, expected) from None
