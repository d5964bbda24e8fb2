"""The engine on a real store: restarts, changed models, damaged payloads, and a killed host
process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import persistkv
from persistkv import Engine
from persistkv.errors import (
    ConfigurationError,
    IdentityMismatchError,
    StoreUnavailableError,
)
from persistkv.integrations.transformers.results import GenerateResult
from persistkv.storage import open_backend
from persistkv.storage.store.savings import read_savings
from tests.host_processes import host_processes
from tests.integrations.transformers.conftest import EngineOptions


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/store?capacity=256MiB"


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_engine(
    model: PreTrainedModel,
    url: str | list[str] | None,
    **options: Unpack[EngineOptions],
) -> Engine:
    defaults: EngineOptions = {
        "block_size": 4,
        "device_blocks": 64,
        "cpu_bytes": "2MiB",
        "host": "thread",  # starts 0.3 s sooner than a process
    }
    return Engine.open(model, url, **(defaults | options))


def answer_without_store(
    model: PreTrainedModel,
    prompt: list[int],
    restored_tokens: int = 0,
) -> GenerateResult:
    """Return the answer of an engine without a store that splits the prompt after the same number
    of tokens."""
    with open_engine(model, None) as engine:
        if restored_tokens:
            engine.generate(prompt[:restored_tokens], 1)
        return engine.generate(prompt, 8)


@pytest.mark.parametrize("host", ["process", "thread"])
@pytest.mark.parametrize("codec", ["raw", "zstd:3"])
def test_engine_restart_restores_identical_pages_and_answer(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
    host: str,
    codec: str,
) -> None:
    with open_engine(model, url, host=host, codec=codec) as first:
        cold = first.generate(prompt, 8)
        resident = first.generate(prompt, 8, store=False)
        assert first.wait_persisted(cold)
        pages = {
            block_hash: page.clone()
            for block_hash, page in first.resident_pages().items()
        }
    with open_engine(model, url, host=host) as second:
        warm = second.generate(prompt, 8)
        assert (warm.stats.persistent_tokens, warm.stats.computed_tokens) == (96, 4)
        assert torch.equal(warm.logits, resident.logits)
        assert warm.tokens == resident.tokens == cold.tokens
        restored = second.resident_pages()
        assert all(
            torch.equal(restored[block_hash], pages[block_hash])
            for block_hash in warm.block_hashes[:24]
        )
        assert second.notices == ()


def test_prewarm_share_promotes_recent_contexts_before_first_request(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    other = [(token + 1) % 256 for token in prompt]
    with open_engine(model, url) as first:
        for one in (other, prompt):
            assert first.wait_persisted(first.generate(one, 2))
            time.sleep(1.1)  # uses are recorded in whole seconds
        row_bytes = -(-first.stats().block_bytes // 4096) * 4096
    with open_engine(model, url, cpu_bytes=60 * row_bytes, prewarm_share=0.5) as second:
        warm = second.generate(prompt, 8)
        assert (
            warm.stats.cpu_tokens,
            warm.stats.persistent_tokens,
            warm.stats.computed_tokens,
        ) == (96, 0, 4)
        cut = second.generate(other, 8).stats
        assert (cut.cpu_tokens, cut.persistent_tokens) == (20, 76), (
            "30 rows hold 25 blocks of one context and 5 of another"
        )
    with pytest.raises(ConfigurationError, match="prewarm_share"):
        open_engine(model, url, prewarm_share=2)


def test_generate_result_id_equals_id_of_listed_request(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url, host="thread") as engine:
        results = [engine.generate(prompt[start:], 2) for start in range(3)]
        assert all(map(engine.wait_persisted, results))
    with persistkv.open_store(url) as store:
        assert {request.id for request in store.requests().requests} == {
            result.req_id for result in results
        }


def test_wait_persisted_frees_cpu_rows_for_next_prompt(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    other = [(token + 1) % 256 for token in prompt]
    with open_engine(model, None) as engine:
        block_bytes = engine.stats().block_bytes
    with open_engine(
        model, url, cpu_bytes=34 * -(-block_bytes // 4096) * 4096
    ) as engine:
        assert engine.wait_persisted(engine.generate(prompt, 1))
        assert engine.wait_persisted(engine.generate(other, 1))
        assert engine.stats().connector.dropped_blocks == 0
    with open_engine(model, url) as engine:
        assert engine.generate(other, 1).stats.persistent_tokens == 96


def test_generate_cpu_tier_smaller_than_prefix_restores_leading_blocks(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
        block_bytes = first.stats().block_bytes
    with open_engine(model, url, cpu_bytes=8 * block_bytes) as second:
        result = second.generate(prompt, 8)
        assert 0 < result.stats.persistent_tokens <= 32
        assert result.tokens == answer_without_store(model, prompt).tokens


def test_generate_hit_in_far_store_writes_blocks_to_near_store(
    model: PreTrainedModel,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    near, far = (
        f"lmdb://{tmp_path}/near?capacity=256MiB",
        f"lmdb://{tmp_path}/far?capacity=256MiB",
    )
    with open_engine(model, far) as first:
        cold = first.generate(prompt, 8)
        assert first.wait_persisted(cold)
    with open_engine(model, [near, far]) as second:
        result = second.generate(prompt, 8)
        assert (result.stats.persistent_tokens, result.tokens) == (96, cold.tokens)
        assert second.wait_persisted(result)
        assert [stats.state for stats in second.stats().persistent] == ["open", "open"]
    with open_engine(model, near) as third:
        assert third.generate(prompt, 8).stats.persistent_tokens == 96


def test_generate_two_stores_persists_context_in_both(
    model: PreTrainedModel,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    urls = [f"lmdb://{tmp_path}/{name}?capacity=256MiB" for name in ("near", "far")]
    with open_engine(model, urls) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
    for url in urls:
        with open_engine(model, url) as other:
            assert other.generate(prompt, 8).stats.persistent_tokens == 96


def test_engine_restart_restores_only_context_of_same_salt(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 8, salt="one"))
    with open_engine(model, url) as second:
        assert second.generate(prompt, 8, salt="two").stats.restored_tokens == 0
        assert second.generate(prompt, 8, salt="one").stats.persistent_tokens == 96


def test_engine_restart_restores_only_context_of_same_tenant(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    tenants = (None, "anna", "berta")
    with open_engine(model, url) as first:
        for tenant in tenants:
            answer = first.generate(prompt, 8, tenant=tenant)
            assert answer.stats.restored_tokens == 0
            assert first.wait_persisted(answer)
    with open_engine(model, url) as second:
        assert second.generate(prompt, 8, tenant="clara").stats.restored_tokens == 0
        for tenant in tenants:
            answer = second.generate(prompt, 8, tenant=tenant)
            assert answer.stats.persistent_tokens == 96


def test_engine_requiring_tenant_neither_restores_nor_stores_without_one(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
    with open_engine(model, url, tenant="required") as second:
        answer = second.generate(prompt, 8)
        assert answer.stats.restored_tokens == 0
        assert not second.wait_persisted(answer)
        own = second.generate(prompt, 8, tenant="anna")
        assert own.stats.restored_tokens == 0
        assert second.wait_persisted(own)
        assert second.stats().load_reasons["refused"] == 1
    with pytest.raises(ConfigurationError, match="one of default, required"):
        open_engine(model, url, tenant="anna")


def other_weights(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_model(seed=1)


def edited_row(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    model = make_model()
    with torch.no_grad():
        model.model.embed_tokens.weight[3, 5] += 0.01
    return model


def other_rope_theta(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_model(rope_parameters={"rope_type": "default", "rope_theta": 77.0})


def other_dtype(make_model: Callable[..., LlamaForCausalLM]) -> LlamaForCausalLM:
    return make_model().to(torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (other_weights, "weights"),
        (edited_row, "weights"),
        (other_rope_theta, "config.rope_parameters.rope_theta"),
        (other_dtype, "dtype.kv"),
    ],
)
def test_engine_changed_model_misses_and_names_field_or_is_refused(
    model: PreTrainedModel,
    make_model: Callable[..., LlamaForCausalLM],
    url: str,
    prompt: list[int],
    change: Callable[..., PreTrainedModel],
    field: str,
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
    other = change(make_model)
    with pytest.raises(IdentityMismatchError) as refusal:
        open_engine(other, url, strict_identity=True)
    assert field in [difference.field for difference in refusal.value.differences]
    with open_engine(other, url) as second:
        result = second.generate(prompt, 8)
        assert result.stats.restored_tokens == 0
        assert result.tokens == answer_without_store(other, prompt).tokens
        (notice,) = second.notices
        assert field in notice
    with open_engine(other, url, strict_identity=True) as third:
        assert third.generate(prompt, 8).stats.persistent_tokens == 96
        assert third.notices == ()
    with open_engine(model, url, strict_identity=True) as again:
        assert again.generate(prompt, 8).stats.persistent_tokens == 96


def test_engine_unusable_store_starts_unless_required(
    model: PreTrainedModel,
    tmp_path: Path,
    url: str,
    prompt: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "store").write_text("in the way")
    with pytest.raises(StoreUnavailableError, match="is a file"):
        open_engine(model, url, required=True)
    caplog.clear()
    with open_engine(model, url) as engine:
        assert (
            engine.generate(prompt, 8).tokens
            == answer_without_store(model, prompt).tokens
        )
    assert caplog.text.count("the store does not open") == 1


def test_engine_copied_checkpoint_hits_and_other_dtype_misses(
    make_model: Callable[..., LlamaForCausalLM],
    tmp_path: Path,
    url: str,
    prompt: list[int],
) -> None:
    make_model().save_pretrained(tmp_path / "one")
    make_model().save_pretrained(tmp_path / "copy")
    with open_engine(tmp_path / "one", url) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
    with open_engine(tmp_path / "copy", url) as second:
        assert second.generate(prompt, 8).stats.persistent_tokens == 96
    with open_engine(str(tmp_path / "one"), url, dtype=torch.bfloat16) as cast:
        assert cast.generate(prompt, 8).stats.restored_tokens == 0
        assert "dtype" in cast.notices[0]


def test_engine_flipped_payload_byte_misses_and_answers_correctly(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
    tmp_path: Path,
) -> None:
    with open_engine(model, url) as first:
        result = first.generate(prompt, 8)
        assert first.wait_persisted(result)
        page = first.resident_pages()[result.block_hashes[5]].numpy().tobytes()
    data = tmp_path / "store" / "segments" / "00000000.seg"
    content = bytearray(data.read_bytes())
    position = content.index(page[:64])
    content[position] ^= 0x10
    data.write_bytes(content)
    with open_engine(model, url) as second:
        damaged = second.generate(prompt, 8)
        expected = answer_without_store(model, prompt, damaged.stats.restored_tokens)
        assert damaged.stats.restored_tokens < 96
        assert damaged.tokens == expected.tokens
        assert torch.equal(damaged.logits, expected.logits)
        assert second.wait_persisted(damaged)
    with open_engine(model, url) as third:
        assert third.generate(prompt, 8).stats.persistent_tokens == 96


def host_process() -> int:
    (pid,) = host_processes()
    return pid


def test_engine_killed_host_process_restarts_and_persists_requests(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url, host="process") as engine:
        expected = engine.generate(prompt, 8)
        assert engine.wait_persisted(expected)
        pid = host_process()
        os.kill(pid, signal.SIGKILL)
        for number in range(3):
            fresh = [number, *prompt[1:]]
            assert (
                engine.generate(fresh, 8, load=False).tokens
                == answer_without_store(model, fresh).tokens
            )
        deadline = time.monotonic() + 60.0
        while engine.stats().persistent[0].state != "open":
            assert time.monotonic() < deadline
            engine.generate([1, 2, 3], 1)
            time.sleep(0.05)
        assert host_process() != pid
        later = engine.generate([77, *prompt], 8)
        assert engine.wait_persisted(later)
    with open_engine(model, url) as second:
        assert second.generate([77, *prompt], 8).stats.persistent_tokens == 100


def test_wait_persisted_without_store_returns_false(
    model: PreTrainedModel,
    prompt: list[int],
) -> None:
    with open_engine(model, None) as engine:
        assert not engine.wait_persisted(engine.generate(prompt, 1))
        assert engine.flush()


def test_generate_lookup_deadline_exceeded_recomputes_prompt(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 8))
    with open_engine(model, url, lookup_deadline_s=0.0) as second:
        result = second.generate(prompt, 8)
        assert result.stats.computed_tokens == 100
        assert result.tokens == answer_without_store(model, prompt).tokens
        assert second.stats().connector.late_lookups == 1


def test_savings_of_restored_requests_are_recorded(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        cold = first.generate(prompt, 4)
        assert first.wait_persisted(cold)
        again = first.generate(prompt, 4)
    assert (cold.stats.saved_s, again.stats.saved_s) == (0.0, 0.0), (
        "nothing was restored from the store"
    )
    with open_engine(model, url) as second:
        warm = second.generate(prompt, 4, labels={"user": "anna"})
        second.generate(prompt, 4, labels={"user": "ben"})
    assert warm.stats.persistent_tokens == 96
    with closing(open_backend(url, read_only=True)) as backend:
        (total,) = read_savings(backend)
    assert (total.requests, total.tokens) == (1, 96)
    assert list(total.labels) == ["user=anna"], "the second one hit the device"
    assert total.prefill_tokens == 100
    assert total.prefill_s == pytest.approx(cold.stats.prefill_s)
    assert warm.stats.saved_s == pytest.approx(96 * total.prefill_s / 100)
    assert warm.stats.saved_s == pytest.approx(total.seconds(96))


def test_generate_saved_seconds_are_at_speed_that_loads_are_compared_with(
    model: PreTrainedModel,
    url: str,
    prompt: list[int],
) -> None:
    with open_engine(model, url) as first:
        assert first.wait_persisted(first.generate(prompt, 1))
    with open_engine(model, url, prefill_tokens_per_s=1_000.0) as second:
        warm = second.generate(prompt, 1)
    assert warm.stats.persistent_tokens == 96
    assert warm.stats.saved_s == pytest.approx(0.096)


@pytest.mark.parametrize("tokens_per_s", [1.0, 1e12])
def test_generate_loads_only_what_is_faster_than_computing(
    model: PreTrainedModel,
    tmp_path: Path,
    tokens_per_s: float,
) -> None:
    url = f"lmdb://{tmp_path}/store"
    prompts = []
    for start in range(2):
        prompts.append([(start + 7 * number) % 250 for number in range(200)])
    with open_engine(model, url) as first:
        cold = [first.generate(prompt, 1) for prompt in prompts]
        assert all(map(first.wait_persisted, cold))
    with open_engine(
        model, url, load_policy="auto", prefill_tokens_per_s=tokens_per_s
    ) as second:
        # nothing is known of the store before the end of the first load
        trial = second.generate(prompts[0], 1)
        deadline = time.monotonic() + 60
        while not any(second.stats().load_reasons.values()):
            assert time.monotonic() < deadline
            second.wait_persisted(trial, 0.01)
        warm = second.generate(prompts[1], 1)
        counts = second.stats().load_reasons
    assert warm.tokens == cold[1].tokens
    if tokens_per_s == 1.0:
        assert counts["loaded"] == 2
        assert warm.stats.load_reason == "loaded"
        assert warm.stats.persistent_tokens == 196
    else:
        assert counts["too_slow"] + counts["too_short"] == 1
        assert warm.stats.load_reason in ("too_slow", "too_short")
        assert warm.stats.persistent_tokens == 0


@pytest.mark.parametrize(
    ("name", "value"), [("load_policy", "often"), ("prefill_tokens_per_s", 0)]
)
def test_open_invalid_load_option_raises(
    model: PreTrainedModel,
    tmp_path: Path,
    name: str,
    value: object,
) -> None:
    options: dict[str, Any] = {name: value}
    with pytest.raises(ConfigurationError, match=name):
        Engine.open(model, tmp_path / "store", **options)
