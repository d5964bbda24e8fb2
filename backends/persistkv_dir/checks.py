"""Checks of a shared directory for ``persistkv doctor``: its file system, mount and mode."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from persistkv.storage.checks import Check, Level
from persistkv.storage.mounts import existing_parent, remote_type, type_of

_ON_DISK = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "tmpfs", "ramfs"}
)
"""Types of file systems that no other host can see. A type that is neither here nor known as remote
may be local or shared."""


def check_directory(root: Path) -> Iterator[Check]:
    """Yield the checks of a directory, which need not exist. Failures are outcomes; nothing is
    raised, and nothing is changed."""
    try:
        existing = existing_parent(root)
        yield _file_system(existing)
        yield _mount_point(root)
        if existing == root:
            yield _mode(root)
        else:
            yield _absent(root, existing)
    except OSError as error:
        found = f"{root}: {error.strerror}"
        yield Check(
            "directory",
            Level.PROBLEM,
            found,
            "let the user of the engines search all directories above it",
        )


def _file_system(existing: Path) -> Check:
    """Check whether other hosts can mount the directory.

    :param existing: the directory, or its nearest parent that exists.
    """
    subject = "file system"
    remote = remote_type(existing)
    if remote is not None:
        return Check(subject, Level.OK, f"{remote}: other hosts can mount it")
    kind = type_of(existing)
    if kind in _ON_DISK:
        todo = (
            "several hosts need a directory on a mount that they share; one host needs no "
            "shared store: use lmdb://"
        )
        return Check(subject, Level.NOTE, f"{kind}, which only this host sees", todo)
    found = f"{kind or 'of an unknown type'}: it is not known whether other hosts can mount it"
    return Check(
        subject, Level.NOTE, found, "make sure that all hosts mount the same directory"
    )


def _mount_point(root: Path) -> Check:
    """Check that the store is not a mount point itself."""
    subject = "mount point"
    if not os.path.ismount(root):
        return Check(subject, Level.OK, "the store is a directory below it")
    found = (
        f"{root} is one: while nothing is mounted there, engines create another store on "
        f"the local disk"
    )
    return Check(
        subject, Level.WARNING, found, f"name a directory in it, such as {root}/kv"
    )


def _mode(root: Path) -> Check:
    """Check the owner and the mode of the store's directory."""
    status = root.stat()
    subject = "directory"
    mode = stat.S_IMODE(status.st_mode)
    found = f"mode {mode:04o}, user id {status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        return Check(
            subject,
            Level.PROBLEM,
            f"{root} is not a directory",
            "name another one, or move it away",
        )
    if status.st_uid != os.geteuid():
        todo = f"engines on all hosts run as its owner; this process has user id {os.geteuid()}"
        return Check(subject, Level.WARNING, found, todo)
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        found += ": other users can replace and delete content"
        return Check(subject, Level.WARNING, found, f"chmod go-w {root}")
    return Check(subject, Level.OK, found)


def _absent(root: Path, existing: Path) -> Check:
    """Check whether the store's directory can be created.

    :param existing: its nearest parent that exists.
    """
    if os.access(existing, os.W_OK | os.X_OK):
        return Check(
            "directory",
            Level.NOTE,
            f"{root} does not exist",
            "the first engine that writes creates it",
        )
    found = f"{root} does not exist, and this user may not create it in {existing}"
    return Check(
        "directory",
        Level.PROBLEM,
        found,
        "create it, owned by the user of the engines, with mode 0700",
    )
