"""vLLM engine in a process: ``engine_process.py '{"model": …, "connector": …, "engine": …}'``.

Reads one JSON command per line, answers each with one line of JSON, and exits at the end of its
input.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm import LLM, RequestOutput
    from vllm.config import VllmConfig


class Server:
    """vLLM engine and its commands."""

    def __init__(
        self,
        model: str,
        connector: dict[str, Any] | None,
        engine: dict[str, Any],
        transfer: dict[str, Any] | None = None,
    ) -> None:
        from vllm import LLM

        if engine.get("async_scheduling"):
            schedule_asynchronously()
        options: dict[str, Any] = {
            "max_model_len": 2048,
            "dtype": "float32",
            "seed": 0,
            "block_size": 32,
        } | engine
        options.setdefault("distributed_executor_backend", "uni")
        if connector is not None:
            options["kv_transfer_config"] = {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": connector,
            } | (transfer or {})
        self._llm: LLM = LLM(
            model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            disable_log_stats=False,
            max_num_seqs=4,
            **options,
        )

    def generate(
        self,
        prompts: list[list[int]],
        max_tokens: int = 12,
        params: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return greedy answers, and the number of cached tokens of each prompt."""
        return _answers(self._run(prompts, max_tokens, params)[0])

    def measure(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Generate as above; also return the total seconds and the seconds until each prompt's
        first token."""
        outputs, seconds = self._run(prompts, max_tokens, None)
        latencies = [output.metrics.first_token_latency for output in outputs]
        return _answers(outputs) | {"seconds": seconds, "ttft": latencies}

    def margins(self, prompts: list[list[int]], max_tokens: int = 12) -> list[float]:
        """Return, for each prompt, the smallest difference between the log-probabilities of an
        answer's token and of the second most likely token.
        """
        outputs, _ = self._run(prompts, max_tokens, None, logprobs=2)
        found = []
        for output in outputs:
            ranked = [
                sorted((some.logprob for some in step.values()), reverse=True)
                for step in output.outputs[0].logprobs
            ]
            found.append(min(first - second for first, second, *_ in ranked))
        return found

    def _run(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        params: dict[str, Any] | None,
        logprobs: int | None = None,
    ) -> tuple[list[RequestOutput], float]:
        from vllm import SamplingParams

        extra = None if params is None else {"kv_transfer_params": params}
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=extra,
        )
        begin = time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
        )
        return outputs, time.perf_counter() - begin

    def metrics(self) -> dict[str, float]:
        """Return the counters and gauges with "offload" in their name, summed over their labels."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if "offload" in metric.name and hasattr(metric, "value"):
                found[metric.name] = found.get(metric.name, 0) + metric.value
        return found

    def change(self, how: str, seed: int = 1) -> None:
        """Replace the weights by others, the same in each engine.

        :param how: ``function``: with ``apply_model``. ``memory``: without a call, as another
            process would that shares the memory of the parameters. ``reload_weights``: from the
            checkpoint, with this method of the workers.
        """
        if how == "function":
            self._llm.apply_model(functools.partial(change_weights, seed=seed))
        elif how == "memory":
            core = self._llm.llm_engine.engine_core.engine_core
            change_weights(
                core.model_executor.driver_worker.worker.model_runner.model, seed
            )
        else:
            self._llm.collective_rpc(how)

    def look(self) -> None:
        """Call a function in the workers that changes nothing."""
        self._llm.apply_model(count_parameters)

    def reset(self) -> bool:
        """Reset all caches of vLLM, as a trainer does after an update."""
        return bool(self._llm.reset_prefix_cache(reset_connector=True))

    def rest(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)

    def delete(self) -> None:
        """Delete the ``LLM`` object, as a notebook does. Send no further command."""
        del self._llm
        gc.collect()

    def close(self) -> None:
        """Shut the engine down as a program does that exits normally."""
        # a deleted object has shut its engine down
        if hasattr(self, "_llm"):
            self._llm.llm_engine.engine_core.shutdown()


def change_weights(model: torch.nn.Module, seed: int) -> None:
    """Add noise to each parameter."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.data.add_(0.3 * torch.randn(parameter.shape, generator=generator))


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _answers(outputs: list[RequestOutput]) -> dict[str, Any]:
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
    }


def schedule_asynchronously() -> None:
    """Have vLLM use the option ``async_scheduling``, which it turns off on CPUs: on GPUs, the next
    step is scheduled while one is computed."""
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: VllmConfig) -> None:
        check(config)
        config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(check_and_keep)


def main(kind: type[Server] = Server) -> None:
    """Run a server of this class until the end of the input."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # redirects vLLM's own output to standard error
    server = kind(**json.loads(sys.argv[1]))
    print(json.dumps({"ready": os.getpid()}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        print(json.dumps(getattr(server, command.pop("do"))(**command)), file=answers)
    server.close()


if __name__ == "__main__":
    main()
