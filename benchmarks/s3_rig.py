"""Helpers shared by the S3 benchmarks: a server, buckets, packs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import boto3

from benchmarks.store_rig import fresh_keys
from persistkv.config import StoreUrl
from persistkv.memory.rows import ByteArray, StagedBlocks
from persistkv.storage.format.codec import RawCodec
from persistkv.storage.format.pack_writer import PackWriter, Section
from persistkv.storage.format.seal import PLAIN, Seal
from persistkv_s3 import S3Backend


@contextmanager
def server(given: str | None) -> Iterator[str]:
    """Yield the endpoint of an S3 server: the given one, or by default a moto server in a process
    of its own.

    Credentials that are missing in the environment are set to ``test`` and ``testsecret``.
    """
    os.environ.setdefault("AWS_ACCESS_KEY_ID", "test")
    os.environ.setdefault("AWS_SECRET_ACCESS_KEY", "testsecret")
    if given is not None:
        yield given
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def plain_client(endpoint: str) -> Any:
    """Return a boto3 client with default settings."""
    return boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")


def make_bucket(endpoint: str) -> str:
    """Create a bucket with a unique name; return the name."""
    bucket = f"benchmark-{uuid.uuid4().hex}"
    plain = plain_client(endpoint)
    plain.create_bucket(Bucket=bucket)
    plain.close()
    return bucket


def pack_of(namespace: bytes, blocks: ByteArray, seal: Seal = PLAIN) -> PackWriter:
    """Return a pack of these blocks under new random keys."""
    section = Section(
        0, blocks.shape[1], fresh_keys(len(blocks)), StagedBlocks([blocks]), 0
    )
    return PackWriter(namespace, RawCodec(), [section], seal=seal)


def open_alone(url: str) -> S3Backend:
    """Open a store without its background work, whose requests depend on time:
    ``benchmarks.s3_fleet`` counts them."""
    parsed = StoreUrl.parse(url)
    options, rest = S3Backend.split_options(parsed)
    blobs = S3Backend.open_blobs(parsed, rest, read_only=False)
    return S3Backend(blobs, options, url, background=False)
