"""Log records of persistkv in vLLM's log.

vLLM configures the loggers below ``vllm`` only, and in some processes after it has loaded its
plugins. Records of other packages would lose their time, level and process, and those below WARNING
would be lost.
"""

from __future__ import annotations

import copy
import logging


class _VllmHandler(logging.Handler):
    """Passes records to vLLM's logger, with the name of this package before their texts; to the
    root logger while vLLM's has no handlers (``VLLM_CONFIGURE_LOGGING=0``)."""

    def emit(self, record: logging.LogRecord) -> None:
        logger = logging.getLogger("vllm")
        if not logger.handlers:
            logger = logging.getLogger()
        if not logger.isEnabledFor(record.levelno):
            return
        # a copy, because the record may have other handlers
        named = copy.copy(record)
        named.msg = f"persistkv: {record.getMessage()}"
        named.args = None  # the arguments are in the text already
        logger.handle(named)


def use_vllm_logging(*packages: str) -> None:
    """Log the records of these packages as vLLM logs its own: with its handlers and its level.

    A package with handlers or a level of its own, set by the application, is left as it is.
    """
    for package in packages:
        logger = logging.getLogger(package)
        if logger.handlers or logger.level != logging.NOTSET:
            continue
        logger.addHandler(_VllmHandler())
        # let all records pass, because vLLM's level, which may be set later, decides
        logger.setLevel(logging.DEBUG)
        logger.propagate = False
