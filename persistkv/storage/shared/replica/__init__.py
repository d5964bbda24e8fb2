"""Replica of one namespace's index: the catalogue that a handle searches, in a private LMDB
environment."""

from persistkv.storage.shared.replica.folder import ReplicaFolder
from persistkv.storage.shared.replica.replica import (
    Bound,
    CommitPlan,
    KeysPlace,
    PackBlob,
    Removals,
    Replica,
)

__all__ = [
    "Bound",
    "CommitPlan",
    "KeysPlace",
    "PackBlob",
    "Removals",
    "Replica",
    "ReplicaFolder",
]
