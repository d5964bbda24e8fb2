"""``persistkv warm``: ask engines to read stored requests into memory."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
import typer

from persistkv.config import parse_duration
from persistkv.errors import MissingOptionError
from persistkv.storage.host.prewarm import (
    WarmAnswer,
    request_warm,
    warm_answers,
    withdraw_warm,
)
from persistkv.storage.host.status import read_statuses
from persistkv_tools import options, render
from persistkv_tools.options import Selection, chosen_requests, opened

_LOOK_S = 0.5
_SHOWN = 20
_PREWARMING = "prewarm_share; in vLLM the tier persistkv-prewarm"


class Warmed(msgspec.Struct, frozen=True):
    """One stored request that engines were asked to read into memory."""

    request: str
    namespace: str
    blocks: int
    raw_bytes: int
    live_engines: int
    """Engines of its namespace with a recent status; on S3, engines publish one only if their URL
    has ``status``."""
    answers: list[WarmAnswer]
    """Answers of the engines that accepted the request; usually empty without ``--wait``."""


def warm(
    url: options.Url,
    requests: options.RequestIds = None,
    label: options.Labels = None,
    namespace: options.InNamespace = None,
    ttl: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="Also ask engines that start within this time."
        ),
    ] = "1h",
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Wait at most this long for an engine's answer, e.g. 5m.",
        ),
    ] = None,
    withdraw: Annotated[
        bool,
        typer.Option(
            "--withdraw", help="No longer ask for these contexts; promoted blocks stay."
        ),
    ] = False,
    json: options.Json = False,
) -> None:
    """Ask engines to promote contexts, that is, to read them into memory before they are needed.

    Only engines with prewarming do so (option prewarm_share; in vLLM the tier persistkv-prewarm).
    Exit code 1: with --wait, no engine answered for a context, or one cannot promote all of it.

    Example: persistkv warm lmdb:///var/cache/kv 0c4de6a0 --ttl 10m
    """
    if not requests and not label:
        raise MissingOptionError("warm", "ids of requests, or --label")
    ttl_s = parse_duration(ttl, name="--ttl")
    wait_s = None if wait is None else parse_duration(wait, name="--wait")
    with opened(url, writable=True) as backend:
        chosen = chosen_requests(
            backend, requests or [], Selection.parse(label), namespace
        )
        if withdraw:
            for found in chosen:
                withdraw_warm(backend, found.namespace.id, found.manifest.id)
            asked = []
        else:
            asked = [
                request_warm(backend, found.namespace.id, found.manifest.id, ttl_s)
                for found in chosen
            ]
        deadline = time.monotonic() + (wait_s or 0)
        while time.monotonic() < deadline and not all(
            warm_answers(backend, row) for row in asked
        ):
            time.sleep(_LOOK_S)
        now, warmed = time.time(), list[Warmed]()
        engines = (
            [status for status in read_statuses(backend) if status.is_live(now)]
            if asked
            else []
        )
        for found, row in zip(chosen, asked, strict=False):
            live = sum(status.namespace == row.namespace for status in engines)
            sizes = found.manifest.blocks, found.manifest.raw_bytes
            warmed.append(
                Warmed(
                    found.manifest.id,
                    row.namespace,
                    *sizes,
                    live,
                    warm_answers(backend, row),
                )
            )
    if json:
        render.print_json(
            {
                "url": url,
                "withdrawn": len(chosen) if withdraw else 0,
                "requests": warmed,
            }
        )
    elif withdraw:
        render.say(f"no longer asked for: {render.count(len(chosen), 'request')}")
    else:
        _print(warmed, ttl, waited=wait_s is not None)
    promoted = all(
        one.answers and not any(answer.missing for answer in one.answers)
        for one in warmed
    )
    if wait_s is not None and not promoted:
        raise typer.Exit(1)


def _print(warmed: list[Warmed], ttl: str, *, waited: bool) -> None:
    for one in warmed[:_SHOWN]:
        size = (
            f"{render.count(one.blocks, 'block')}, {render.format_size(one.raw_bytes)}"
        )
        render.say(f"asked for {one.request} ({size})")
        for answer in one.answers:
            lacks = "are not stored, or exceed the engine's prewarm share"
            missing = (
                f"; {render.count(answer.missing, 'block')} {lacks}"
                if answer.missing
                else ""
            )
            render.say(
                f"  engine {answer.engine[:8]} promotes "
                f"{render.count(answer.blocks, 'block')}{missing}"
            )
    if len(warmed) > _SHOWN:
        render.say(f"and {len(warmed) - _SHOWN:,} more; --json lists all")
    if not warmed:
        render.say("no request has these labels")
    elif not any(one.answers for one in warmed):
        if not any(one.live_engines for one in warmed):
            render.say(
                "nothing was promoted: no running engine of this model has published its status"
                " (on S3, engines do so only with ?status=10s)"
            )
        elif waited:
            render.say(
                f"no engine answered: they prewarm only if configured ({_PREWARMING}), while "
                f"they serve requests"
            )
        else:
            render.say(
                "running engines that prewarm check every 5 s while they serve requests; "
                "--wait 1m shows their answers"
            )
        render.say(
            f"engines that start within {ttl} and prewarm ({_PREWARMING}) promote it first"
        )
