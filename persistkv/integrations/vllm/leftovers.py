"""Regions that killed engines left under /dev/shm.

1. Only a file of this user that no process maps is removed.
2. Processes of other containers may share /dev/shm and be invisible here. If this is possible, a file is removed only
   if it has not been modified for ten minutes: an engine maps its region while it starts, and a mapping stays valid
   after the file is removed.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from persistkv.cpu.region_file import SHARED_MEMORY_DIRECTORY
from persistkv.integrations.vllm.regions import mappings

logger = logging.getLogger(__name__)

_PATTERN = "vllm_offload_*.mmap"
_SAFE_AGE_S = 600
_FIRST_PID_NAMESPACE = 0xEFFFFFFC  # its inode number, fixed by the kernel


def remove_leftovers(directory: str = SHARED_MEMORY_DIRECTORY) -> list[str]:
    """Remove the files of regions that no process uses.

    :returns: the removed paths.
    """
    left = [path for path in sorted(Path(directory).glob(_PATTERN)) if _may_be_removed(path)]
    used = _mapped_files() if left else set()
    removed = []
    for path in left:
        try:
            status = path.stat(follow_symlinks=False)
            if (status.st_dev, status.st_ino) not in used:
                path.unlink()
                removed.append(str(path))
        except OSError as error:
            logger.debug("%s stays: %s", path, error)
    if removed:
        logger.info("removed what killed engines left: %s", ", ".join(removed))
    return removed


def _may_be_removed(path: Path) -> bool:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return False
    old = time.time() - status.st_mtime > _SAFE_AGE_S
    return status.st_uid == os.geteuid() and (old or _sees_all_processes())


def _sees_all_processes() -> bool:
    try:
        return os.stat("/proc/self/ns/pid").st_ino == _FIRST_PID_NAMESPACE
    except OSError:
        return False


def _mapped_files() -> set[tuple[int, int]]:
    """Return device and inode of every file that a visible process maps or has open."""
    used: set[tuple[int, int]] = set()
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            used.update((mapping.device, mapping.inode) for mapping in mappings(process) if mapping.inode)
            for name in os.listdir(f"/proc/{process}/fd"):
                status = os.stat(f"/proc/{process}/fd/{name}")
                used.add((status.st_dev, status.st_ino))
        except OSError:
            continue  # the process has ended, or is another user's, which cannot use a file of this user
    return used
