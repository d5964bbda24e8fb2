"""Checks of a bucket's settings for ``persistkv doctor``: those that cost money or lose content.

1. Reading a setting needs a permission of its own, which no engine needs. Without it, the outcome
   says so and is no error.
2. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from persistkv.storage.checks import Check, Level
from persistkv_s3.client.bucket import Bucket
from persistkv_s3.client.transport import RequestRefusedError, S3Error

_ARCHIVES = frozenset({"GLACIER", "DEEP_ARCHIVE"})
"""Storage classes whose objects must be restored before they can be read."""
_DENIED = frozenset({"AccessDenied", "403", "AllAccessDisabled"})
_RULES = "docs/s3.md, Settings of the bucket"


class Rule(NamedTuple):
    """A rule of a bucket that applies to some objects of the store."""

    name: str
    """Id of the rule; may be empty."""
    prefix: str
    """Start of the keys of the objects that it applies to; empty: all of the bucket."""
    content: Mapping[str, Any]
    """The rule as S3 returns it."""

    def __str__(self) -> str:
        return f"rule {self.name or '(no id)'} on {self.prefix or 'all objects'}"


def check_settings(bucket: Bucket, prefix: str) -> Iterator[Check]:
    """Yield the checks of a bucket's settings. Failures are outcomes; nothing is raised.

    :param prefix: start of the keys of all objects of the store.
    """
    # read the lifecycle rules first, which decide whether versioning is a problem
    lifecycle = _Setting(
        bucket,
        "lifecycle",
        "get_bucket_lifecycle_configuration",
        "s3:GetLifecycleConfiguration",
    )
    rules = _rules_for_store(lifecycle.content.get("Rules", ()), prefix)
    versioning = _Setting(
        bucket, "versioning", "get_bucket_versioning", "s3:GetBucketVersioning"
    )
    yield from versioning.outcomes(
        lambda found: _versioning_effects(found, rules, prefix)
    )
    yield from lifecycle.outcomes(lambda found: _lifecycle_effects(rules, prefix))
    # ask for this setting only if a rule moves objects to this class: the request needs a
    # permission of its own
    if any("INTELLIGENT_TIERING" in _storage_classes(rule) for rule in rules):
        tiering = _Setting(
            bucket,
            "archive tiers",
            "list_bucket_intelligent_tiering_configurations",
            "s3:GetIntelligentTieringConfiguration",
        )
        yield from tiering.outcomes(lambda found: _tiering_effects(found, prefix))
    lock = _Setting(
        bucket,
        "object lock",
        "get_object_lock_configuration",
        "s3:GetBucketObjectLockConfiguration",
    )
    yield from lock.outcomes(_object_lock_effects)


class _Effect(NamedTuple):
    """Consequence of a setting for the store."""

    level: Level
    found: str
    """The present state, in words for a user."""
    todo: str = ""
    """The remedy; empty if none is needed."""


class _Setting:
    """A setting of the bucket that was read, or the reason why it was not."""

    def __init__(
        self,
        bucket: Bucket,
        check: str,
        operation: str,
        permission: str,
    ) -> None:
        """Read the setting.

        :param check: name of the check, for its outcome.
        :param operation: boto3's name of the request.
        :param permission: the permission that the request needs, which the outcome names if it is
            missing.
        """
        self._check = check
        self._reason = ""
        """Why the setting was not read; empty: it was."""
        self.content: Mapping[str, Any] = {}
        """The setting; empty: it was never set, or was not read."""
        try:
            self.content = bucket.setting(operation)
        except RequestRefusedError as error:
            if error.code in _DENIED:
                self._reason = f"needs {permission}"
            else:
                self._reason = f"the server does not tell ({error.code or error})"
        except S3Error as error:
            self._reason = str(error)

    def outcomes(
        self,
        evaluate: Callable[[Mapping[str, Any]], Iterable[_Effect]],
    ) -> Iterator[Check]:
        """Yield an outcome for each effect of the setting, or one that says why it was not read.

        :param evaluate: returns the effects of ``content``.
        """
        if self._reason:
            todo = f"compare the bucket with {_RULES}, or let an administrator run this check"
            yield Check(self._check, Level.NOTE, f"not checked: {self._reason}", todo)
            return
        for effect in evaluate(self.content):
            yield Check(self._check, effect.level, effect.found, effect.todo)


def _versioning_effects(
    found: Mapping[str, Any],
    rules: Sequence[Rule],
    prefix: str,
) -> Iterator[_Effect]:
    """Yield whether the bucket keeps old versions of deleted objects for ever."""
    status = found.get("Status", "")
    if status != "Enabled":
        # a bucket whose versioning is suspended keeps its old versions, and gets no further ones
        yield _Effect(Level.OK, status.lower() or "off")
        return
    # only rules that apply to all objects of the store help
    expiring = [rule for rule in rules if "NoncurrentVersionExpiration" in rule.content]
    whole = [rule for rule in expiring if prefix.startswith(rule.prefix)]
    if whole:
        rule = whole[0]
        days = rule.content["NoncurrentVersionExpiration"].get("NoncurrentDays", "?")
        yield _Effect(Level.OK, f"on; {rule} expires old versions after {days} days")
        return
    yield _Effect(
        Level.WARNING,
        "on: each deleted object stays as an old version, which takes space and is paid",
        f"expire noncurrent versions after a day ({_RULES}), or use another bucket",
    )


def _lifecycle_effects(rules: Sequence[Rule], prefix: str) -> Iterator[_Effect]:
    """Yield the effects of the bucket's lifecycle rules."""
    effects: list[_Effect] = []
    for rule in rules:
        effects += _expiry_effects(rule, prefix)
        effects += _transition_effects(rule)
    if effects:
        yield from effects
    else:
        yield _Effect(Level.OK, "no rule expires or moves objects of the store")


def _expiry_effects(rule: Rule, prefix: str) -> Iterator[_Effect]:
    """Yield the effect of a rule that expires objects of the store."""
    expiration = rule.content.get("Expiration", {})
    when = expiration.get("Days", expiration.get("Date"))
    # a rule without a time only expires markers of deletions, which no store reads
    if when is None:
        return
    after = f"after {when} days" if "Days" in expiration else f"on {when}"
    # expired packs are only misses, but a rule that is not limited to packs also expires objects of
    # the index
    if "/packs/" in rule.prefix.removeprefix(prefix):
        yield _Effect(
            Level.NOTE,
            f"{rule} expires packs {after}: they are misses then",
            "the option ttl counts from the last use",
        )
        return
    text = f"{rule} expires objects {after}, those of the index among them: content is lost"
    yield _Effect(
        Level.PROBLEM,
        text,
        "exclude the store's prefix from the rule, and use the options ttl and capacity",
    )


def _transition_effects(rule: Rule) -> Iterator[_Effect]:
    """Yield the effects of a rule that moves objects to other storage classes."""
    classes = _storage_classes(rule)
    archives = sorted(_ARCHIVES.intersection(classes))
    if archives:
        text = (
            f"{rule} moves objects to {', '.join(archives)}, where they cannot be read: "
            f"content is lost"
        )
        yield _Effect(Level.PROBLEM, text, "exclude the store's prefix from the rule")
    others = sorted(classes.difference(_ARCHIVES))
    if others:
        text = f"{rule} moves objects to {', '.join(others)}"
        yield _Effect(
            Level.NOTE,
            text,
            "each read is charged, and 30 days or more of storage: worth it for rarely read stores",
        )


def _storage_classes(rule: Rule) -> set[str]:
    """Return the storage classes to which a rule moves present versions of objects."""
    return {
        transition.get("StorageClass", "")
        for transition in rule.content.get("Transitions", ())
    }


def _tiering_effects(
    found: Mapping[str, Any],
    prefix: str,
) -> Iterator[_Effect]:
    """Yield the effects of Intelligent-Tiering: archived objects cannot be read."""
    configurations = found.get("IntelligentTieringConfigurationList", ())
    archiving = [
        rule
        for rule in _rules_for_store(configurations, prefix)
        if rule.content.get("Tierings")
    ]
    for rule in archiving:
        text = (
            f"{rule} archives objects without reads: they cannot be read then, and content "
            f"is lost"
        )
        yield _Effect(
            Level.PROBLEM,
            text,
            "remove the archive access tiers for the store's prefix",
        )
    if not archiving:
        yield _Effect(Level.OK, "no archive access in Intelligent-Tiering")


def _object_lock_effects(found: Mapping[str, Any]) -> Iterator[_Effect]:
    """Yield whether objects can be deleted: a lock keeps the space of deleted ones."""
    configuration = found.get("ObjectLockConfiguration", {})
    retention = configuration.get("Rule", {}).get("DefaultRetention", {})
    if retention:
        period = f"{retention.get('Years', '?')} years"
        if "Days" in retention:
            period = f"{retention['Days']} days"
        mode = retention.get("Mode", "").lower()
        text = f"on, {mode} retention of {period}: nothing that is deleted frees space"
        yield _Effect(Level.WARNING, text, "use a bucket without object lock")
    elif configuration.get("ObjectLockEnabled") == "Enabled":
        yield _Effect(
            Level.NOTE,
            "on, without a default retention",
            "set none, and place no legal hold on the store's objects",
        )
    else:
        yield _Effect(Level.OK, "off")


def _rules_for_store(
    contents: Iterable[Mapping[str, Any]],
    prefix: str,
) -> list[Rule]:
    """Return the rules that are in force for some objects of the store.

    :param contents: rules as S3 returns them.
    """
    rules: list[Rule] = []
    for content in contents:
        # a filter of several conditions has them in ``And``; old rules have a prefix and no filter
        scope = content.get("Filter", {})
        conditions = scope.get("And", scope)
        # objects of a store have no tags, so a rule for tagged objects does not apply
        has_tags = bool(conditions.get("Tag") or conditions.get("Tags"))
        old_prefix = content.get("Prefix", "")
        start = str(conditions.get("Prefix", old_prefix))
        # if one prefix contains the other, the rule applies to the store or to a part of it
        overlaps = start.startswith(prefix) or prefix.startswith(start)
        is_enabled = content.get("Status") == "Enabled"
        if is_enabled and overlaps and not has_tags:
            # rules of Intelligent-Tiering spell this field ``Id``
            name = content.get("ID", content.get("Id", ""))
            rules.append(Rule(str(name), start, content))
    return rules
