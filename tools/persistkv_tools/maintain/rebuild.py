"""``persistkv rebuild``: builds a new catalogue from a store's packs after damage."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable

import msgspec
from rich.progress import Progress

from persistkv.config import StoreUrl
from persistkv.storage import BACKENDS
from persistkv.storage.stats import Rebuilt
from persistkv_tools import render
from persistkv_tools.command import Command
from persistkv_tools.progress import byte_progress


class RebuildReport(msgspec.Struct, frozen=True, kw_only=True):
    """Result of ``persistkv rebuild``."""

    url: str
    rebuilt: bool
    """Whether there is a new catalogue."""
    intact: bool
    """Whether the catalogue was not damaged, and so nothing was changed."""
    seconds: float
    packs: int = 0
    """Number of packs in the new catalogue."""
    blocks: int = 0
    namespaces: int = 0
    stored_bytes: int = 0
    read_bytes: int = 0
    """Bytes of the files that were read."""
    skipped: dict[str, int] = {}
    """Reason → number of traces of packs that are not in the new catalogue."""
    capacity: int | None = None
    """Capacity that the new catalogue records; None: there is none."""
    damaged: str | None = None
    """Directory of the damaged catalogue, which was renamed; None: there was none."""


def rebuild(url: str, *, json: bool) -> None:
    """Build a new catalogue from a store's packs, after its catalogue was lost or damaged. No
    engine may use a local store meanwhile; the damaged catalogue is renamed. To rebuild a store
    that an engine has renamed, name the directory damaged-… in the store. In a shared store, packs
    that the index has lost are named again.

    Blocks are found again; requests, labels and pins are lost. Give the capacity in the URL, if it
    is not the default.

    Exit code 1: no pack was found, and nothing was changed.

    Example: persistkv rebuild lmdb:///var/cache/kv?capacity=200GiB
    """
    parsed = StoreUrl.parse(url)
    driver = BACKENDS.get(parsed.scheme)
    begin = time.monotonic()
    with byte_progress() as progress:
        found = driver.rebuild(parsed, _shown(progress))
    report = _report(url, found, time.monotonic() - begin)
    if json:
        render.print_json(report)
    else:
        _print(report)
    if not (report.rebuilt or report.intact):
        raise SystemExit(1)


COMMAND = Command(rebuild)


def _shown(progress: Progress) -> Callable[[int, int], None]:
    """Return a function that takes the bytes read so far and the total, and shows them."""
    task = progress.add_task("read", total=None)

    def show(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)

    return show


def _report(
    url: str,
    found: Rebuilt | None,
    seconds: float,
) -> RebuildReport:
    """Return the report of a rebuild.

    :param found: what the driver found; None: the catalogue is intact.
    """
    if found is None:
        return RebuildReport(
            url=url,
            rebuilt=False,
            intact=True,
            seconds=seconds,
        )
    return render.view_of(
        RebuildReport,
        found,
        url=url,
        rebuilt=found.packs > 0,
        intact=False,
        seconds=seconds,
        skipped=dict(found.skipped),
        # 0: no pack was found, so no catalogue with a capacity was written
        capacity=found.capacity or None,
    )


def _print(report: RebuildReport) -> None:
    """Print what the rebuild has found and changed."""
    if report.intact:
        render.say("the catalogue is not damaged: there is nothing to rebuild")
        return
    pace = render.format_pace(report.read_bytes, report.seconds)
    render.say(f"read {render.format_size(report.read_bytes)} {pace}")
    size = render.format_size(report.stored_bytes)
    found = f"{render.count(report.packs, 'pack')} ({render.count(report.blocks, 'block')}, {size})"
    render.say(f"found {found} in {render.count(report.namespaces, 'namespace')}")
    for reason, number in sorted(report.skipped.items()):
        render.say(f"not listed: {number:,} {reason}")
    if not report.rebuilt:
        render.say("nothing was changed")
        return
    if report.damaged is not None:
        render.say(f"the damaged catalogue is in {report.damaged}")
    render.say("requests, labels and pins are lost; engines find the blocks by key")
    if report.capacity is None:
        return
    capacity = render.format_size(report.capacity)
    render.say(
        f"capacity: {capacity}; to change it: persistkv set {shlex.quote(report.url)} capacity=SIZE"
    )
