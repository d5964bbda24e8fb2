"""Copies from one open store to another, as ``persistkv push`` makes them."""

from __future__ import annotations

from persistkv_tools.options import Selection
from persistkv_tools.transfer.export import Source
from persistkv_tools.transfer.push import Transfer


def ignore(num_bytes):
    pass


def push(source, target, namespaces, selection, took, **options):
    sources = [
        Source.of(
            source,
            space,
            filter(selection.takes, source.catalogue(space.id).manifests()),
        )
        for space in namespaces
    ]
    transfer = Transfer(
        sources, target, "lmdb:///target", everything=selection == Selection()
    )
    return transfer.run(target, took, **options)
