"""Type of the file system that a path is on. LMDB's locks and memory map need a local one; a shared
store in a directory needs one that all its machines mount.
"""

from __future__ import annotations

import os
from pathlib import Path

MOUNTS = Path("/proc/self/mountinfo")

_NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs")
_CLUSTER = (
    "ceph",
    "lustre",
    "gpfs",
    "beegfs",
    "wekafs",
    "panfs",
    "glusterfs",
    "ocfs2",
    "gfs2",
    "orangefs",
    "pvfs2",
)
_REMOTE = frozenset(_NETWORK + _CLUSTER)
# beginnings of the names of programs that serve remote files through FUSE
_REMOTE_FUSE = (
    "sshfs",
    "s3fs",
    "mount-s3",
    "mountpoint-s3",
    "gcsfuse",
    "goofys",
    "rclone",
    "glusterfs",
    "juicefs",
    "ceph",
)


def remote_type(path: Path) -> str | None:
    """Return the type of the file system, such as ``nfs4``, if other hosts may write it.

    Return None for a local file system, and if its type is not known: a type that is not listed
    here is taken for local.

    :raises OSError: the path cannot be read.
    """
    kind = type_of(path)
    if kind is None:
        return None
    is_remote = kind in _REMOTE
    # of ``fuse.PROGRAM``, only the program tells whether the files are remote
    if kind.startswith("fuse."):
        program = kind.removeprefix("fuse.")
        is_remote = program.startswith(_REMOTE_FUSE)
    return kind if is_remote else None


def existing_parent(path: Path) -> Path:
    """Return the path if it exists; else its nearest parent that does, where its directories would
    be created.

    :raises OSError: a parent may not be searched.
    """
    candidates = (path, *path.parents)
    return next(candidate for candidate in candidates if candidate.exists())


def type_of(path: Path) -> str | None:
    """Return the type of the file system that an existing path is on; None: it is not known.

    :raises OSError: the path cannot be read.
    """
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # there is no /proc
        return None
    # a line has: id, parent, device, root, mount point, options, tags …, "-", type, source, options
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        fields = mount.split()
        if len(fields) < 3:
            continue
        device_number = fields[2]
        if device_number == number:
            return file_system.split()[0] if file_system else None
    return None
