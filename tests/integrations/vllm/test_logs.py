"""Log lines of persistkv in a process of vLLM."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from persistkv.integrations.vllm.logs import use_vllm_logging


@pytest.fixture
def package() -> Iterator[logging.Logger]:
    """A logger without configuration, and its name for ``use_vllm_logging``."""
    logger = logging.getLogger("persistkv_of_this_test")
    yield logger
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True


@pytest.fixture
def vllm_log() -> Iterator[io.StringIO]:
    """Output of the logger ``vllm``, configured as vLLM does it, at level INFO."""
    logger, output = logging.getLogger("vllm"), io.StringIO()
    before = (logger.handlers, logger.level, logger.propagate)
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter("(%(process)d) %(levelname)s %(message)s"))
    logger.handlers, logger.propagate = [handler], False
    logger.setLevel(logging.INFO)
    yield output
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


def test_package_records_have_format_and_level_of_vllm(
    package: logging.Logger, vllm_log: io.StringIO
) -> None:
    use_vllm_logging(package.name)
    use_vllm_logging(package.name)  # the plugin, and each tier
    child = package.getChild("part")
    child.debug("not shown")
    child.info("%s open", "lmdb:///kv")
    lines = vllm_log.getvalue().splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(") INFO persistkv: lmdb:///kv open")


def test_package_records_keep_tracebacks(
    package: logging.Logger, vllm_log: io.StringIO
) -> None:
    use_vllm_logging(package.name)
    try:
        raise OSError("no space")
    except OSError:
        package.exception("dropped")
    assert "ERROR persistkv: dropped\nTraceback" in vllm_log.getvalue()
    assert vllm_log.getvalue().endswith("OSError: no space\n")


def test_package_records_reach_root_while_vllm_configures_nothing(
    package: logging.Logger, caplog: pytest.LogCaptureFixture
) -> None:
    use_vllm_logging(package.name)
    logging.getLogger("vllm").handlers.clear()
    package.warning("dropped")
    assert caplog.messages == ["persistkv: dropped"]


def test_package_with_own_handler_or_level_is_left_alone(
    package: logging.Logger, vllm_log: io.StringIO, caplog: pytest.LogCaptureFixture
) -> None:
    package.setLevel(logging.ERROR)
    use_vllm_logging(package.name)
    assert (package.handlers, package.propagate) == ([], True)
    package.error("dropped")
    assert vllm_log.getvalue() == ""
    assert caplog.messages == ["dropped"]
