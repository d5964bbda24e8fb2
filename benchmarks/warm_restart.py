"""Time to first token, cold and restored from LMDB, for a Llama of a chosen size on a chosen device.

Each run opens an engine on an empty store and answers a prompt that it never saw; then a second engine, which shares
nothing with the first but the store, answers the same prompt. Cold and warm take turns; weights are random.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rig import show
from persistkv.integrations.transformers import Engine


def make_model(arguments: argparse.Namespace) -> LlamaForCausalLM:
    """A model of the size asked for."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32_000,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden * 7 // 2,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 128,
        num_key_value_heads=max(1, arguments.hidden // 512),
        max_position_embeddings=1 << 17,
    )
    with torch.device(arguments.device):
        return LlamaForCausalLM(config).to(getattr(torch, arguments.dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2048])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--codec", default="raw")
    arguments = parser.parse_args()
    model = make_model(arguments)
    draw = np.random.default_rng(0)
    rows = []
    for tokens in arguments.tokens:
        rows.append(measure(model, tokens, arguments, draw))
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    device = torch.cuda.get_device_name() if arguments.device.startswith("cuda") else "CPU"
    title = f"TTFT of a Llama with {size:.1f} billion parameters, {arguments.dtype}, on {device}"
    show(
        title, ["prompt", "KV", "cold", "restored from LMDB", "cold / restored", "tokens restored", "same tokens"], rows
    )


def measure(
    model: LlamaForCausalLM, tokens: int, arguments: argparse.Namespace, draw: np.random.Generator
) -> list[str]:
    """One length of prompt."""
    cold, warm, restored, loaded, same = [], [], 0, 0, 0
    options = {"device_blocks": tokens // 16 + 64, "cpu_bytes": "16GiB", "codec": arguments.codec}
    for run in range(arguments.runs + 1):
        prompt = draw.integers(0, 32_000, tokens).tolist()
        with tempfile.TemporaryDirectory() as directory:
            url = f"lmdb://{Path(directory)}/store?capacity=64GiB"
            with Engine.open(model, url, **options) as engine:
                engine.generate(draw.integers(0, 32_000, tokens).tolist(), 1, store=False)  # kernels, allocator
                first = engine.generate(prompt, 8)
                engine.wait_persisted(first)
            with Engine.open(model, url, **options) as engine:
                engine.generate(draw.integers(0, 32_000, 64).tolist(), 1, store=False)
                second = engine.generate(prompt, 8)
        if run:
            cold.append(first.stats.ttft_s)
            warm.append(second.stats.ttft_s)
            restored, loaded = second.stats.persistent_tokens, second.stats.bytes_loaded
            same += list(first.tokens) == list(second.tokens)
    median_cold, median_warm = statistics.median(cold), statistics.median(warm)
    return [
        f"{tokens:,} tokens",
        f"{loaded / (1 << 20):,.0f} MiB",
        f"{median_cold * 1e3:.0f} ms",
        f"{median_warm * 1e3:.0f} ms",
        f"{median_cold / median_warm:.1f}",
        f"{restored:,}",
        f"{same} of {arguments.runs}",
    ]


if __name__ == "__main__":
    main()
