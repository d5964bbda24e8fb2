"""The files of docs/deploy: they parse, and every option in them exists and fits the others."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import socket
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from persistkv.config import StoreUrl, convert_options, parse_size
from persistkv.integrations.vllm.metrics import COUNTERS, GAUGES, PREFIX
from persistkv.integrations.vllm.options import vllm_options
from persistkv_lmdb.backend import LmdbOptions
from persistkv_s3 import S3Backend
from persistkv_tools.cli import main

DOCS = Path(__file__).parents[2] / "docs"
DEPLOY = DOCS / "deploy"
HOST_EXIT_S = 20  # time for the host process to exit after the engine
SCRAPE_TIMEOUT_S = 10  # default of Prometheus


def kubernetes() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the stateful set and its containers by name."""
    (stateful,) = [
        part
        for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if part["kind"] == "StatefulSet"
    ]
    return stateful, {
        one["name"]: one for one in stateful["spec"]["template"]["spec"]["containers"]
    }


def bucket_exporter() -> dict[str, Any]:
    """Return the container that exports the metrics of the bucket."""
    (deployment,) = [
        part
        for part in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
        if part["kind"] == "Deployment"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return]


def compose() -> dict[str, Any]:
    services: dict[str, Any] = yaml.safe_load(
        (DEPLOY / "docker-compose.yaml").read_text()
    )["services"]
    return services


def systemd() -> configparser.SectionProxy:
    parser = configparser.ConfigParser(
        interpolation=None, delimiters=("=",), strict=False
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string((DEPLOY / "vllm.service").read_text().replace("\\\n", " "))
    return parser["Service"]


COMMANDS: dict[str, Callable[[], list[str]]] = {
    "kubernetes": lambda: kubernetes()[1]["vllm"]["command"],
    "compose": lambda: compose()["vllm"]["entrypoint"],
    "systemd": lambda: shlex.split(systemd()["ExecStart"]),
}


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def connector(command: list[str]) -> dict[str, Any]:
    transfer = json.loads(option(command, "--kv-transfer-config"))
    assert (transfer["kv_connector"], transfer["kv_role"]) == (
        "OffloadingConnector",
        "kv_both",
    )
    extra: dict[str, Any] = transfer["kv_connector_extra_config"]
    return extra


@pytest.mark.parametrize("platform", COMMANDS)
def test_deploy_config_tier_options_exist(platform: str) -> None:
    extra = connector(COMMANDS[platform]())
    assert extra["spec_name"] == "TieringOffloadingSpec"
    for entry in extra["secondary_tiers"]:
        kind = entry.pop("type")
        if kind == "persistkv-prewarm":
            assert 0 < entry.pop("share") <= 1
            assert not entry
            continue
        assert kind == "persistkv"
        url = StoreUrl.parse(vllm_options(entry).tier_options["url"])
        if url.scheme == "lmdb":
            assert convert_options(
                LmdbOptions, url.options, where="lmdb"
            ).policy.capacity
        else:
            assert S3Backend.new_policy(url).ttl_s


@pytest.mark.parametrize("platform", COMMANDS)
def test_deploy_stop_timeout_covers_shutdown_and_commit(platform: str) -> None:
    needed = int(option(COMMANDS[platform](), "--shutdown-timeout")) + HOST_EXIT_S
    if platform == "kubernetes":
        stateful, containers = kubernetes()
        needed += int(containers["vllm"]["lifecycle"]["preStop"]["exec"]["command"][-1])
        given = stateful["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    elif platform == "compose":
        given = int(compose()["vllm"]["stop_grace_period"].removesuffix("s"))
    else:
        given = int(systemd()["TimeoutStopSec"])
    assert given >= needed


def test_deploy_memory_limits_exceed_cpu_tier() -> None:
    stateful, containers = kubernetes()
    spec = stateful["spec"]["template"]["spec"]
    (shm,) = [
        volume["emptyDir"]["sizeLimit"]
        for volume in spec["volumes"]
        if volume["name"] == "shm"
    ]
    shared = parse_size(f"{shm}B", name="sizeLimit")
    assert shared > connector(COMMANDS["kubernetes"]())["cpu_bytes_to_use"]
    assert (
        parse_size(
            f"{containers['vllm']['resources']['limits']['memory']}B", name="memory"
        )
        > shared
    )
    used = connector(COMMANDS["compose"]())["cpu_bytes_to_use"]
    # docker's gb is 2**30 bytes
    assert int(compose()["vllm"]["shm_size"].removesuffix("gb")) << 30 > used


def test_deploy_exporter_command_and_options_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for scheme, command in (
        ("lmdb", kubernetes()[1]["store-metrics"]["command"]),
        ("lmdb", compose()["store-metrics"]["entrypoint"]),
        ("s3", bucket_exporter()["command"]),
    ):
        program, name, url, *options = command
        assert program == "persistkv"
        assert StoreUrl.parse(url).scheme == scheme
        with pytest.raises(SystemExit):
            main([name, "--help"])
        shown = capsys.readouterr().out
        assert all(word in shown for word in options if word.startswith("--"))


def test_deploy_exports_every_store_of_the_engines() -> None:
    _, containers = kubernetes()
    tiers = connector(containers["vllm"]["command"])["secondary_tiers"]
    stores = {tier["url"].partition("?")[0] for tier in tiers if "url" in tier}
    exporters = (containers["store-metrics"], bucket_exporter())
    exported = {exporter["command"][2].partition("?")[0] for exporter in exporters}
    assert exported == stores


@pytest.mark.slow
def test_deploy_exporter_of_hanging_bucket_answers_within_scrape_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("boto3")
    from persistkv_tools.inspect.serve_metrics import StoreCollector

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    url = bucket_exporter()["command"][2]
    with socket.create_server(("127.0.0.1", 0)) as server:  # accepts, never answers
        endpoint = f"http://127.0.0.1:{server.getsockname()[1]}"
        with closing(
            StoreCollector(f"{url}&endpoint_url={endpoint}&region=us-east-1")
        ) as collector:
            began = time.monotonic()
            (up,) = collector.collect()
            assert time.monotonic() - began < SCRAPE_TIMEOUT_S
    assert up.samples[0].value == 0


def test_alert_rules_metrics_exist_and_alerts_are_documented() -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-rules.yml").read_text())["groups"]
    known = {f"{PREFIX}{name}_total" for name in COUNTERS} | {
        PREFIX + name for name in GAUGES
    }
    page = (DOCS / "vllm-production.md").read_text()
    for rule in group["rules"]:
        metrics = set(re.findall(r"vllm:\w+", rule["expr"]))
        assert metrics
        assert metrics <= known | {"vllm:kv_offload_config_info"}
        assert f"| `{rule['alert']}` |" in page
