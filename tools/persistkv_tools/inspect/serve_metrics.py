"""``persistkv serve-metrics``."""

from __future__ import annotations

import sys
from contextlib import closing, suppress
from typing import Annotated

import typer

from persistkv.errors import ConfigurationError, MissingExtraError
from persistkv_tools import render
from persistkv_tools.options import Json, Url, opened


def serve_metrics(
    url: Url,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0: a free one.")
    ] = "127.0.0.1:9464",
    once: Annotated[bool, typer.Option("--once", help="Write the metrics to standard output, and end.")] = False,
    json: Json = False,
) -> None:
    """Export a store's totals, and what its engines say of themselves, to Prometheus. Ctrl-C ends it.

    Example: persistkv serve-metrics lmdb:///var/cache/kv --listen 0.0.0.0:9464
    """
    host, port = _address(listen)
    try:
        from prometheus_client import CollectorRegistry, generate_latest, start_http_server

        from persistkv_tools.inspect.metrics import StoreCollector
    except ImportError:
        raise MissingExtraError("prometheus-client", "metrics") from None
    with opened(url):  # what is wrong with it is told now, and not to Prometheus
        pass
    registry = CollectorRegistry()
    with closing(StoreCollector(url)) as collector:
        registry.register(collector)
        if once:
            render.print_exact(generate_latest(registry).decode())
            return
        try:
            server, thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigurationError("--listen", listen, f"an address to listen at ({error.strerror})") from None
        address = f"http://{host}:{server.server_port}/metrics"
        if json:
            render.print_json({"url": url, "address": address})
        else:
            render.say(f"metrics of {url} at {address}")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):  # the way out
            thread.join()
        server.shutdown()
        server.server_close()


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 0xFFFF:
        raise ConfigurationError("--listen", listen, "HOST:PORT, e.g. 127.0.0.1:9464")
    return host.strip("[]"), int(port)
