"""Requests to S3 of LMCache's benchmark of second levels, ``bench l2``, with persistkv and with
LMCache's own ``s3`` adapter, in the same run.

Each run stores, looks up and loads 1,000 objects, and a proxy in front of the server counts the
requests, those of opening and of background work included. LMCache's adapter names the bucket in
the name of the host, which a server on loopback does not have: the proxy puts it into the path.
"""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from benchmarks.lmcache_l2 import bench_l2
from benchmarks.rig import show
from benchmarks.s3_proxy import CountingProxy
from benchmarks.s3_rig import make_bucket, server

OBJECTS = 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lmcache-python", default=".venv-lmcache/bin/python")
    parser.add_argument("--kib", type=int, default=256)
    parser.add_argument(
        "--at-once",
        type=int,
        nargs="+",
        default=[125, 20, 4],
        help="objects of one task; divisors of 1,000",
    )
    parser.add_argument("--in-flight", type=int, default=1, help="tasks at once")
    parser.add_argument("--endpoint", help="S3 server; default: a moto server")
    arguments = parser.parse_args()
    rows: list[list[str]] = []
    with server(arguments.endpoint) as endpoint:
        for at_once in arguments.at_once:
            counts: dict[str, int] = {}
            for name in ("persistkv", "s3"):
                found = count(
                    name,
                    endpoint,
                    arguments.lmcache_python,
                    arguments.kib,
                    at_once,
                    arguments.in_flight,
                )
                counts[name] = sum(found.values())
                verbs = [f"{number} {verb}" for verb, number in sorted(found.items())]
                ratio = counts["persistkv"] / counts[name]
                row = [f"{at_once}", name, f"{counts[name]}", ", ".join(verbs)]
                rows.append([*row, f"{ratio:.3f}"])
    show(
        f"Requests for 1,000 objects of {arguments.kib} KiB, stored, looked up and loaded, "
        f"tasks at once: {arguments.in_flight}",
        ["objects of a task", "adapter", "requests", "of these", "persistkv ÷ adapter"],
        rows,
    )


def count(
    name: str,
    endpoint: str,
    python: str,
    kib: int,
    at_once: int,
    in_flight: int,
) -> dict[str, int]:
    """Return the requests of one run with an adapter, by verb."""
    bucket = make_bucket(endpoint)
    port = urlsplit(endpoint).port
    if port is None:
        raise SystemExit(f"no port in {endpoint}")
    proxy = CountingProxy(port, bucket if name == "s3" else "")
    try:
        bench_l2(
            python,
            configuration(name, proxy.port, bucket),
            kib,
            at_once,
            rounds=OBJECTS // (at_once * in_flight),
            options=["--warmup-rounds", "0", "--in-flight", str(in_flight)],
        )
        return proxy.by_verb()
    finally:
        proxy.close()


def configuration(name: str, port: int, bucket: str) -> dict[str, object]:
    """Return the configuration of an adapter on a bucket behind a local port."""
    if name == "s3":
        return {
            "type": "s3",
            "s3_endpoint": f"127.0.0.1:{port}",
            "s3_region": "us-east-1",
            "s3_prefer_http2": False,
            "disable_tls": True,
            "aws_access_key_id": "test",
            "aws_secret_access_key": "testsecret",
        }
    return {
        "type": "plugin",
        "module_path": "persistkv.integrations.lmcache.adapter",
        "class_name": "PersistKVL2Adapter",
        "adapter_params": {
            "url": f"s3://{bucket}/kv?endpoint_url=http://127.0.0.1:{port}",
            "models": {"bench-model": "name:bench"},
            "engine": "bench",
        },
    }


if __name__ == "__main__":
    main()
