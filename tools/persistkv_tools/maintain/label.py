"""``persistkv label``."""

from __future__ import annotations

from typing import Annotated

import typer

from persistkv.errors import ConfigurationError
from persistkv_tools import render
from persistkv_tools.maintain.labelling import parse_labels, relabel
from persistkv_tools.options import InNamespace, Json, Request, Url, opened
from persistkv_tools.selection import find_request


def label(
    url: Url,
    request: Request,
    labels: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Labels to give, over those of that name.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="NAME", help="Take this one away; may be given again.")
    ] = None,
    namespace: InNamespace = None,
    json: Json = False,
) -> None:
    """Tag a context, for ls, prune, export and push to find it by. It counts as used.

    Example: persistkv label lmdb:///var/cache/kv 0c4de6a0 user=anna project=moon --remove draft
    """
    if not (labels or remove):
        raise ConfigurationError("label", request, "NAME=VALUE or --remove NAME")
    given = parse_labels(labels or [])
    if both := given.keys() & set(remove or []):
        raise ConfigurationError("--remove", min(both), "another name than one that is given")
    with opened(url, writable=True) as backend:
        found = find_request(backend, request, namespace)
        now = relabel(backend, found, given, remove or [])
    name, space = found.manifest.id, found.namespace.id.hex()
    if json:
        render.print_json({"url": url, "request": name, "namespace": space, "labels": now})
    else:
        render.say(f"{name} (namespace {space[:8]}): {render.format_labels(now) or 'no labels'}")
