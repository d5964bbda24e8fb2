"""``persistkv set``: show and change a store's policy."""

from __future__ import annotations

import shutil
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec

from persistkv.config import StoreUrl, exact_duration, parse_duration, parse_size
from persistkv.errors import ConfigurationError
from persistkv.storage import open_backend
from persistkv.storage.backend import Backend
from persistkv.storage.inspection.requests import with_uses
from persistkv.storage.policy import Policy, check_quota
from persistkv_tools import render
from persistkv_tools.command import (
    URL,
    Command,
    Positional,
    add_flag,
    add_shared,
    confirm,
    ensure_consent,
)
from persistkv_tools.options import opened

_NONE = "none"
_QUOTA = "quota."


class Consequences(msgspec.Struct, frozen=True):
    """Consequences of a new policy for the content of a store."""

    disk_bytes: int
    """Bytes that the store takes on disk now."""
    evicted_bytes: int
    """Part of ``disk_bytes`` that the next commits evict to fit a new capacity."""
    quota_bytes: dict[str, int]
    """For each tenant above its new quota, the bytes above it, which are evicted."""
    expiring_requests: int
    """Requests that the next commits delete, because they are older than a new ttl."""
    requests: int
    """All requests of the store."""
    missing_disk_bytes: int
    """Bytes that a local disk lacks for the store to grow to the new capacity."""


_VALUES = Positional(
    "values",
    "NAME=VALUE",
    "capacity=200GiB, ttl=7d, ttl=none, quota.TENANT=20GiB or quota.TENANT=none. By default, show "
    "all.",
    is_many=True,
)


def set_(
    url: str,
    values: list[str],
    *,
    dry_run: bool,
    yes: bool,
    json: bool,
) -> None:
    """Show or change a store's capacity, ttl, and quotas of tenants. Engines may use the store
    meanwhile.

    Options in a URL do not change an existing store. This command does, after it has shown the
    consequences.

    Example: persistkv set lmdb:///var/cache/kv capacity=200GiB ttl=30d quota.anna=20GiB
    """
    with opened(url) as backend:
        before = backend.policy()
        after = _changed(before, values)
        consequences = _consequences(backend, url, before, after)
        is_local = not backend.capabilities.remote
    if not json:
        _print(before, after, consequences, is_local=is_local)
    done = False
    if after != before and not dry_run and _consents(yes=yes, json=json):
        after = _set_values(url, values)
        done = True
    if json:
        report = {
            "url": url,
            "before": before,
            "after": after,
            "consequences": consequences,
            "changed": done,
        }
        render.print_json(report)
    elif done:
        # A local store evicts content in the transaction that changes its policy. Requests that
        # expire by a new ttl are deleted by the next commits of engines.
        is_applied = is_local and after.ttl_s == before.ttl_s
        later = "; engines apply it with their next commit"
        render.say("changed" if is_applied else f"changed{later}")


def _consents(*, yes: bool, json: bool) -> bool:
    """Return whether the user consents to the change; ask, unless ``yes``."""
    ensure_consent("set", "--yes or --dry-run", yes=yes, json=json)
    return yes or confirm("Change the policy?")


def _set_values(url: str, values: list[str]) -> Policy:
    """Change the policy of a store, and return it as changed."""
    with closing(open_backend(url)) as backend:
        # read the policy again, because another command may have changed other values meanwhile
        policy = _changed(backend.policy(), values)
        backend.set_policy(policy)
    return policy


def _add_options(parser: ArgumentParser) -> None:
    add_flag(parser, "--dry-run", "Only show the consequences.")
    add_shared(parser, "--yes")


COMMAND = Command(set_, (URL, _VALUES), _add_options)


def _changed(policy: Policy, values: list[str]) -> Policy:
    """Return the policy, changed by texts ``NAME=VALUE``; raise ConfigurationError if one is
    invalid."""
    for text in values:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError("set", text, "NAME=VALUE, such as capacity=200GiB")
        if name.startswith(_QUOTA):
            policy = replace(policy, quotas=_changed_quotas(policy.quotas, text))
        elif name == "capacity":
            policy = replace(policy, capacity=parse_size(value, name="capacity"))
        elif name == "ttl":
            policy = replace(policy, ttl_s=_parse_ttl(value))
        elif name == "placement":
            # the present placement is accepted, and changes nothing
            _check_placement(policy, value)
        else:
            raise ConfigurationError(
                "set",
                text,
                "one of capacity=SIZE, ttl=DURATION, ttl=none, quota.TENANT=SIZE and "
                "quota.TENANT=none",
            )
    return policy


def _check_placement(policy: Policy, value: str) -> None:
    """Raise ConfigurationError unless a value is the placement of the policy. The present placement
    is accepted, because it is shown like the values that can be changed."""
    if value != policy.placement:
        expected = (
            f"{policy.placement}, fixed at creation; persistkv copy copies a store "
            f"into a new one"
        )
        raise ConfigurationError("placement", value, expected)


def _changed_quotas(
    quotas: Mapping[str, int],
    text: str,
) -> dict[str, int]:
    """Return quotas changed by a text: ``quota.TENANT=SIZE`` sets the quota of a tenant, and
    ``quota.TENANT=none`` removes it."""
    # the name of a tenant may contain a "="
    name, _, value = text.rpartition("=")
    tenant = name.removeprefix(_QUOTA)
    changed = dict(quotas)
    if value == _NONE:
        # check only the name of the tenant: 1 is a valid size
        check_quota(tenant, 1)
        changed.pop(tenant, None)
        return changed
    try:
        changed[tenant] = parse_size(value, name=name)
    except ConfigurationError as error:
        expected = f"{_NONE}, or {error.expected}"
        raise ConfigurationError(name, value, expected) from None
    return changed


def _consequences(
    backend: Backend,
    url: str,
    before: Policy,
    after: Policy,
) -> Consequences:
    """Return the effects of a change of the policy: evictions, expiry, and a lack of disk
    space."""
    stats = backend.stats()
    # bytes by which the store may grow; negative: it must shrink to the new capacity
    growth_bytes = 0
    if after.capacity is not None:
        growth_bytes = after.capacity - stats.disk_bytes
    missing = 0
    if after.capacity != before.capacity:
        missing = _missing_disk_bytes(url, growth_bytes)
    expiring = 0
    if after.ttl_s not in (None, before.ttl_s):
        expiring = _expiring(backend, after)
    return Consequences(
        disk_bytes=stats.disk_bytes,
        evicted_bytes=max(0, -growth_bytes),
        quota_bytes=_above_quotas(backend, after),
        expiring_requests=expiring,
        requests=stats.requests,
        missing_disk_bytes=missing,
    )


def _missing_disk_bytes(url: str, growth_bytes: int) -> int:
    """Return the bytes that the disk of a store lacks for this growth; 0 for a bucket, whose free
    space is unknown."""
    location = Path(StoreUrl.parse(url).location)
    if not location.is_dir():
        return 0
    disk = shutil.disk_usage(location)
    return max(0, growth_bytes - disk.free)


def _above_quotas(backend: Backend, policy: Policy) -> dict[str, int]:
    """Return, for each tenant that is above its quota in a policy, by how many bytes."""
    above: dict[str, int] = {}
    if not policy.quotas:
        return above
    for totals in backend.tenants():
        quota = policy.quotas.get(totals.tenant)
        if quota is not None and totals.stored_bytes > quota:
            above[totals.tenant] = totals.stored_bytes - quota
    return above


def _expiring(backend: Backend, policy: Policy) -> int:
    """Return the number of requests that are older than the ttl of a policy."""
    now = time.time()
    expiring = 0
    for namespace in backend.namespaces():
        manifests = backend.catalogue(namespace.id).manifests()
        for _, use in with_uses(backend, namespace.id, manifests):
            if use is None:
                continue
            # leave out the request's own ttl: it expires the request without this change, too
            expires = use.expires(own_ttl_s=None, store_ttl_s=policy.ttl_s)
            if expires is not None and expires < now:
                expiring += 1
    return expiring


def _print(
    before: Policy,
    after: Policy,
    consequences: Consequences,
    *,
    is_local: bool,
) -> None:
    """Print the old and the new policy, and the effects of the change."""
    sizes = [_size(before.capacity), _size(after.capacity)]
    ttls = [_duration(before.ttl_s), _duration(after.ttl_s)]
    rows = {
        "capacity": _change(sizes),
        "ttl": _change(ttls),
        "placement": before.placement or "-",
        "on disk": render.format_size(consequences.disk_bytes),
    }
    for tenant in sorted({*before.quotas, *after.quotas}):
        old_quota = before.quotas.get(tenant)
        new_quota = after.quotas.get(tenant)
        quotas = [_size(old_quota), _size(new_quota)]
        rows[f"{_QUOTA}{tenant}"] = _change(quotas)
    render.show_pairs(rows)
    _print_evictions(consequences, is_local=is_local)
    if consequences.expiring_requests:
        all_requests = render.count(consequences.requests, "request")
        render.say(
            f"{consequences.expiring_requests:,} of {all_requests} will expire: they were stored "
            "longer ago than the new ttl"
        )
    if consequences.missing_disk_bytes:
        size = render.format_size(consequences.missing_disk_bytes)
        render.say(f"this capacity needs {size} more than the disk has free")


def _print_evictions(consequences: Consequences, *, is_local: bool) -> None:
    """Print the evictions for a new capacity and new quotas, and their time."""
    when = "at once"
    when_by_quota = "at once"
    if not is_local:
        when = "by the next commit of an engine, or by persistkv prune --keep-size"
        when_by_quota = "by an engine within a minute"
    if consequences.evicted_bytes:
        size = render.format_size(consequences.evicted_bytes)
        render.say(f"about {size} will be evicted {when}, least recently used first")
    for tenant, num_bytes in consequences.quota_bytes.items():
        size = render.format_size(num_bytes)
        render.say(
            f"{size} of the tenant {tenant} will be evicted {when_by_quota}, least recently "
            "used first, except what is pinned"
        )
    has_evictions = consequences.evicted_bytes or consequences.quota_bytes
    if has_evictions and not is_local:
        render.say("its bytes are freed an hour later, or by the daily sweep")


def _change(texts: list[str]) -> str:
    """Return a value before and after the change; only one if they are equal."""
    return " → ".join(dict.fromkeys(texts))


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
