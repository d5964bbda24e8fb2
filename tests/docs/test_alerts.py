"""The alerts of docs: each fires on its event and not in normal operation, on series that are
exported."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml

from persistkv.integrations.vllm.metrics import COUNTERS, GAUGES, LABELS, PREFIX
from persistkv.storage import open_backend
from tests.storage.statuses import make_status

DOCS = Path(__file__).parents[2] / "docs"
RULES = [DOCS / "prometheus-rules.yml", DOCS / "deploy" / "prometheus-rules.yml"]
UNIT_TESTS = Path(__file__).with_name("prometheus-rules-test.yml")
SERIES = re.compile(r"^([\w:]+)\{(.*)\}$")
# of the tier's labels of vLLM's metric; their module imports vLLM
CONFIG_INFO = {"store", "host"}
SCRAPED = {"instance"}  # labels that Prometheus adds


def unit_tests() -> list[dict[str, Any]]:
    tests: list[dict[str, Any]] = yaml.safe_load(UNIT_TESTS.read_text())["tests"]
    return tests


def used_series(prefix: str) -> dict[str, set[str]]:
    """Return the labels of the series of the unit tests, by metric."""
    used: dict[str, set[str]] = {}
    for test in unit_tests():
        for entry in test["input_series"]:
            match = SERIES.match(entry["series"])
            assert match, entry
            if match[1].startswith(prefix):
                used.setdefault(match[1], set()).update(re.findall(r"(\w+)=", match[2]))
    return used


def exported_by_exporter(url: str) -> dict[str, set[str]]:
    """Return the labels of the exporter's metrics, by metric, with a store and an engine."""
    from persistkv_tools.inspect.serve_metrics import StoreCollector

    found: dict[str, set[str]] = {}
    with (
        closing(open_backend(url)) as backend,
        closing(StoreCollector(url)) as collector,
    ):
        status = make_status("e1", time=time.time(), breaker="closed")
        backend.publish_status("e1", status.encode())
        for metric in collector.collect():
            for sample in metric.samples:
                found[sample.name] = set(sample.labels)
    return found


def promtool(*arguments: str) -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    command = [program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", RULES, ids=["exporter", "vllm"])
def test_alert_rules_are_valid(rules: Path) -> None:
    promtool("check", "rules", str(rules))


def test_alerts_fire_on_their_events_only() -> None:
    promtool("test", "rules", str(UNIT_TESTS))


def test_alerts_each_have_a_unit_test_in_which_they_fire() -> None:
    alerts: set[str] = set()
    for path in RULES:
        (group,) = yaml.safe_load(path.read_text())["groups"]
        alerts.update(rule["alert"] for rule in group["rules"])
    fired: set[str] = set()
    for test in unit_tests():
        for check in test["promql_expr_test"]:
            for sample in check.get("exp_samples", []):
                fired.update(re.findall(r'alertname="(\w+)"', sample["labels"]))
    assert fired == alerts


def test_alert_unit_tests_use_series_of_vllm_metrics() -> None:
    exported = {f"{PREFIX}{name}_total": set(LABELS) for name in COUNTERS}
    exported.update({PREFIX + name: set(LABELS) for name in GAUGES})
    exported["vllm:kv_offload_config_info"] = CONFIG_INFO
    used = used_series("vllm:")
    assert used
    for metric, labels in used.items():
        assert labels <= exported[metric] | SCRAPED


def test_alert_unit_tests_use_series_of_exporter(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    exported = exported_by_exporter(f"lmdb://{tmp_path}/store?capacity=1GiB")
    used = used_series("persistkv_")
    assert used
    for metric, labels in used.items():
        assert labels <= exported[metric] | SCRAPED
