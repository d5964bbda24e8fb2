"""Make SGLang importable on a machine without a GPU."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

HAS_SGLANG = find_spec("sglang") is not None
_kept: list[torch.library.Library] = []


def prepare() -> None:
    """Define the operators that torchvision registers: its C part does not load with torch for
    CPUs. Call once, before SGLang is imported."""
    import torch

    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    source = (Path(spec.origin).parent / "_meta_registrations.py").read_text()
    names = set(re.findall(r'register_meta\("(\w+)"', source))
    names |= set(re.findall(r"torchvision::(\w+)", source))
    library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for name in sorted(names):
        library.define(f"{name}(Tensor a) -> Tensor")  # type: ignore[no-untyped-call]
    _kept.append(library)
