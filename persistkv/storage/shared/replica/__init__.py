"""Replica of one namespace's index: the catalogue that a handle searches, in a private LMDB
environment."""

from persistkv.storage.shared.replica.folder import ReplicaFolder
from persistkv.storage.shared.replica.limits import Bound, Limits
from persistkv.storage.shared.replica.replica import (
    NO_OBJECT,
    CommitPlan,
    KeysPlace,
    PackBlob,
    Removals,
    Replica,
)

__all__ = [
    "NO_OBJECT",
    "Bound",
    "CommitPlan",
    "KeysPlace",
    "Limits",
    "PackBlob",
    "Removals",
    "Replica",
    "ReplicaFolder",
]
