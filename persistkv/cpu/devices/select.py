"""Selects the transfer strategy of a device."""

from __future__ import annotations

from types import MappingProxyType

import torch

from persistkv.cpu.devices.base import CopyEngine
from persistkv.cpu.devices.cpu import CPUCopyEngine
from persistkv.cpu.devices.cuda import CUDACopyEngine
from persistkv.errors import ConfigurationError

_ENGINES = MappingProxyType[str, type[CopyEngine]]({"cpu": CPUCopyEngine, "cuda": CUDACopyEngine})


def copy_engine_class(device: torch.device) -> type[CopyEngine]:
    """Return the strategy for tensors on a device.

    :raises ConfigurationError: if the kind of device has none.
    """
    if device.type not in _ENGINES:
        raise ConfigurationError("kv_caches device", str(device), f"one of {', '.join(_ENGINES)}")
    return _ENGINES[device.type]
