"""``load`` and ``save`` compared with plain transformers, across processes, and with the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, PreTrainedModel

import persistkv
from persistkv import ConfigurationError, Engine, PersistentCache, PromptTooLongError
from persistkv.storage import open_backend
from persistkv.storage.store.savings import Savings, read_savings
from tests.integrations.transformers.conftest import EngineOptions, tiny_llama

NEW_TOKENS = 40


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "kv"


def generate(
    model: PreTrainedModel,
    prompt: list[int],
    cache: PersistentCache | None = None,
    **options: object,
) -> list[int]:
    inputs = torch.tensor([prompt])
    passed = {} if cache is None else {cache.argument: cache}
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        **passed,
        **{"max_new_tokens": NEW_TOKENS, "do_sample": False} | options,
    )
    tokens: list[int] = output[0].tolist()
    return tokens


def save_answer(
    model: PreTrainedModel,
    prompt: list[int],
    store: Path,
    labels: Mapping[str, str] | None = None,
) -> list[int]:
    cache = persistkv.load(model, prompt, store)
    tokens = generate(model, prompt, cache)
    persistkv.save(cache, tokens, labels=labels)
    return tokens


def test_generate_stored_prefix_returns_tokens_of_plain_transformers(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    expected = generate(model, prompt)
    assert save_answer(model, prompt, store) == expected, "an empty cache"
    cache = persistkv.load(model, prompt, store)
    assert list(cache.restored_tokens) == prompt[:96]
    assert generate(model, prompt, cache) == expected
    longer = [*expected, *prompt[:30]]
    cache = persistkv.load(model, longer, store)
    assert len(cache.restored_tokens) == 128, "KV of generated tokens is restored, too"
    assert generate(model, longer, cache) == generate(model, longer)


def test_generate_hybrid_model_returns_tokens_of_plain_transformers(
    windowed: PreTrainedModel,
    prompt: list[int],
    store: Path,
) -> None:
    expected = save_answer(windowed, prompt, store)
    assert expected == generate(windowed, prompt)
    for _ in range(2):
        cache = persistkv.load(windowed, prompt, store)
        assert len(cache.restored_tokens) == 96
        assert generate(windowed, prompt, cache) == expected
        # the restored cache has no blocks before the window
        persistkv.save(cache, expected)


def test_persistent_cache_beyond_capacity_grows(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    assert generate(model, prompt, cache, max_new_tokens=300) == generate(
        model, prompt, max_new_tokens=300
    )


def test_persistent_cache_cropped_generates_same_tokens_again(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    tokens = generate(model, prompt, cache)
    cache.crop(50)
    assert generate(model, prompt, cache) == tokens


RESTARTED = """
import sys, torch, persistkv
from transformers import AutoModelForCausalLM
path, store, *prompt = sys.argv[1:]
torch.set_num_threads(1)
model, prompt = AutoModelForCausalLM.from_pretrained(path).eval(), [int(token) for token in prompt]
cache = persistkv.load(model, prompt, store, checkpoint=path)
inputs = torch.tensor([prompt])
output = model.generate(
    inputs, attention_mask=torch.ones_like(inputs), **{cache.argument: cache}, max_new_tokens=40, do_sample=False
)
persistkv.save(cache, output)
print(len(cache.restored_tokens), *output[0].tolist())
"""


def test_load_in_new_process_restores_saved_context(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint"
    model.save_pretrained(checkpoint)
    cache = persistkv.load(model, prompt, store, checkpoint=checkpoint)
    expected = generate(model, prompt, cache)
    persistkv.save(cache, expected)
    program = [sys.executable, "-c", RESTARTED]
    arguments = [str(checkpoint), str(store), *map(str, prompt)]
    warm = subprocess.run(
        program + arguments, capture_output=True, text=True, check=True, timeout=120
    )
    restored, *tokens = map(int, warm.stdout.split())
    assert restored == 96
    assert tokens == expected


def test_load_restores_only_contexts_of_its_tenant(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store, tenant="anna")
    expected = generate(model, prompt, cache)
    persistkv.save(cache, expected)
    for tenant in ("berta", None):
        other = persistkv.load(model, prompt, store, tenant=tenant)
        assert other.restored_tokens == ()
    own = persistkv.load(model, prompt, store, tenant="anna")
    assert len(own.restored_tokens) == 96
    assert generate(model, prompt, own) == expected
    options: EngineOptions = {"load_policy": "always", "cpu_bytes": "8MiB"}
    with persistkv.Engine.open(model, store, **options) as engine:
        for tenant, restored in (("berta", 0), (None, 0), ("anna", 96)):
            answer = engine.generate(prompt, 1, tenant=tenant)
            assert answer.stats.persistent_tokens == restored


def test_load_other_weights_salt_or_block_size_misses(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    other = tiny_llama(seed=1)
    assert persistkv.load(other, prompt, store).restored_tokens == ()
    assert persistkv.load(model, prompt, store, salt="tenant").restored_tokens == ()
    assert persistkv.load(model, prompt, store, block_size=8).restored_tokens == ()
    with torch.no_grad():
        changed = tiny_llama()
        changed.lm_head.weight[0] += 1
    assert persistkv.load(changed, prompt, store).restored_tokens == (), (
        "weights that were changed after loading"
    )
    assert generate(other, prompt, persistkv.load(other, prompt, store)) == generate(
        other, prompt
    )


def test_engine_and_load_restore_contexts_of_each_other(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    tokens = save_answer(model, prompt, store, labels={"user": "anna"})
    options: EngineOptions = {
        "cpu_bytes": "8MiB",
        "device_blocks": 32,
        "host": "thread",
    }
    with Engine.open(model, store, **options) as engine:
        found = engine.generate(prompt, NEW_TOKENS)
        assert found.stats.persistent_tokens == 96
        assert [*prompt, *found.tokens] == tokens
        other = [token ^ 1 for token in prompt]
        assert engine.wait_persisted(engine.generate(other, 2))
    assert len(persistkv.load(model, other, store).restored_tokens) == 96


def test_save_returns_id_of_listed_request(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    tokens = generate(model, prompt, cache)
    saved = persistkv.save(
        cache, torch.tensor([tokens]), labels={"user": "anna"}, codec="zstd"
    )
    with persistkv.open_store(store) as opened:
        (request,) = opened.requests().requests
    assert (request.id, request.labels, request.tokens) == (
        saved,
        {"user": "anna"},
        len(tokens) - 1,
    )


def test_load_damaged_block_restores_only_earlier_blocks(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    tokens = save_answer(model, prompt, store)
    segment = max(store.rglob("*.seg"))
    data = bytearray(segment.read_bytes())
    used = [index for index, byte in enumerate(data) if byte]
    # not in the trailers at the ends of packs, which no load reads
    data[used[len(used) // 2]] ^= 1
    segment.write_bytes(data)
    longer = [*tokens, 1]
    cache = persistkv.load(model, longer, store)
    assert len(cache.restored_tokens) < 128
    assert generate(model, longer, cache) == generate(model, longer)


@pytest.mark.parametrize("held", [False, True])
def test_save_tokens_that_the_model_did_not_run_raises_and_stores_nothing(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
    held: bool,
) -> None:
    if held:
        save_answer(model, prompt, store)
    other = [*prompt[:50], *(token ^ 1 for token in prompt[50:])]
    cache = persistkv.load(model, prompt, store)
    answer = generate(model, prompt, cache)
    for wrong in (other, [*prompt, *other], [*answer[:-2], answer[-2] ^ 1]):
        before = persistkv.load(model, wrong, store).restored_tokens
        with pytest.raises(ConfigurationError, match="at position"):
            persistkv.save(cache, wrong)
        assert persistkv.load(model, wrong, store).restored_tokens == before
    persistkv.save(cache, answer)
    assert len(persistkv.load(model, [*answer, 1], store).restored_tokens) == 128


def test_save_after_answer_to_another_prompt_raises(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    cache = persistkv.load(model, prompt, store)
    other = [token ^ 1 for token in prompt]
    answer = generate(model, other, cache)  # skips the tokens that it takes for cached
    with pytest.raises(ConfigurationError, match="at position 0"):
        persistkv.save(cache, answer)
    assert generate(model, other, persistkv.load(model, other, store)) == generate(
        model, other
    )


def test_save_cropped_cache_that_ran_other_tokens_stores_those(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    generate(model, prompt, cache)
    cache.crop(50)
    other = [*prompt[:50], *(token ^ 1 for token in prompt[50:])]
    answer = generate(model, other, cache)
    with pytest.raises(ConfigurationError, match="at position 50"):
        persistkv.save(cache, prompt)
    persistkv.save(cache, answer)
    restored = persistkv.load(model, answer, store)
    assert len(restored.restored_tokens) == 128
    assert generate(model, answer, restored) == generate(model, answer)


def embeddings(model: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"inputs_embeds": model.get_input_embeddings()(ids)}


def shifted(_: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "position_ids": torch.arange(3, 3 + ids.shape[1])[None]}


def padded(_: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def masked(_: LlamaForCausalLM, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("inputs", [embeddings, shifted, padded, masked])
def test_save_kv_of_no_plain_prefix_raises(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
    inputs: Callable[..., dict[str, torch.Tensor]],
) -> None:
    cache = persistkv.load(model, prompt, store)
    with torch.no_grad():
        model(**inputs(model, torch.tensor([prompt])), **{cache.argument: cache})
    with pytest.raises(ConfigurationError, match=r"cache|token_ids"):
        persistkv.save(cache, prompt)


def test_save_kv_of_another_model_raises(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    answer = generate(tiny_llama(seed=1), prompt, cache)
    with pytest.raises(ConfigurationError, match="at position 0"):
        persistkv.save(cache, answer)


def test_load_leaves_nothing_on_model_once_its_cache_is_gone(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    cache = persistkv.load(model, prompt, store)
    generate(model, prompt, cache)
    del cache
    assert not model._forward_pre_hooks
    assert not model._forward_hooks


def savings(url: str) -> list[Savings]:
    with closing(open_backend(url, read_only=True)) as backend:
        return read_savings(backend)


def test_load_and_save_record_savings_that_add_up(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    (cold,) = savings(f"lmdb://{store}")
    assert (cold.requests, cold.prefill_tokens) == (0, 100)
    for _ in range(2):
        cache = persistkv.load(model, prompt, store)
    answer = generate(model, prompt, cache)
    persistkv.save(cache, answer)
    (total,) = savings(f"lmdb://{store}")
    assert (total.requests, total.tokens) == (2, 2 * 96)
    assert total.prefill_tokens == 100, "the prefill of 4 tokens shows no speed"
    seconds = total.seconds(total.tokens)
    assert seconds == pytest.approx(192 * cold.prefill_s / 100)
    with closing(open_backend(f"lmdb://{store}", read_only=True)) as backend:
        assert len(list(backend.note_names(bytes(16)))) == 1


def test_load_of_two_threads_at_once_counts_both(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    with ThreadPoolExecutor(2) as threads:
        loads = [threads.submit(persistkv.load, model, prompt, store) for _ in range(6)]
        restored = [len(load.result().restored_tokens) for load in loads]
    (total,) = savings(f"lmdb://{store}")
    assert (total.requests, total.tokens) == (6, sum(restored))


def test_load_from_read_only_store_restores_and_records_nothing(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    cache = persistkv.load(model, prompt, f"lmdb://{store}?read_only=yes")
    assert len(cache.restored_tokens) == 96
    (total,) = savings(f"lmdb://{store}")
    assert total.requests == 0


def test_load_prompt_beyond_context_length_raises(store: Path) -> None:
    with pytest.raises(
        PromptTooLongError, match=r"33 tokens.*32 tokens, the model's context length"
    ):
        persistkv.load(tiny_llama(max_position_embeddings=32), range(33), store)


def test_save_other_tokens_or_several_sequences_raises(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    save_answer(model, prompt, store)
    cache = persistkv.load(model, prompt, store)
    with pytest.raises(ConfigurationError, match="at position 0"):
        persistkv.save(cache, [token ^ 1 for token in prompt])
    with pytest.raises(ConfigurationError, match="one sequence"):
        generate(model, prompt, cache, num_beams=2)
    for wrong in ([], [[1, 2], [3, 4]]):
        with pytest.raises(ConfigurationError, match="token_ids"):
            persistkv.load(model, wrong, store)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("block_size", "16", "an integer, 1 or more"),
        ("store", 5, "a URL or a path"),
        ("salt", 5, "text"),
        ("tenant", "", "1 to 128 characters"),
        ("model", None, "a checkpoint's directory or name, or a model"),
        ("token_ids", None, "one prompt: integers in one row"),
        ("token_ids", [], "at least one token"),
        ("token_ids", [5, 256], "at least one token, each from 0 to 255"),
        ("blok_size", 8, "one of block_size, checkpoint, "),
    ],
)
def test_load_wrong_argument_raises_naming_it(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
    name: str,
    value: object,
    expected: str,
) -> None:
    given: dict[str, Any] = {"model": model, "token_ids": prompt, "store": store}
    given[name] = value
    with pytest.raises(ConfigurationError) as error:
        persistkv.load(**given)
    assert error.value.field == name
    assert error.value.expected.startswith(expected)


@pytest.mark.parametrize(
    ("name", "value"),
    [("labels", ["a"]), ("codec", 5), ("codec", "gzip"), ("label", {"user": "a"})],
)
def test_save_wrong_argument_raises_naming_it(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
    name: str,
    value: Any,
) -> None:
    cache = persistkv.load(model, prompt, store)
    answer = generate(model, prompt, cache)
    with pytest.raises(ConfigurationError) as error:
        persistkv.save(cache, answer, **{name: value})
    assert error.value.field == name


def test_saved_context_of_restored_tokens_is_a_hit_of_the_first(
    model: LlamaForCausalLM,
    prompt: list[int],
    store: Path,
) -> None:
    for _ in range(2):
        save_answer(model, prompt, store)
    with persistkv.open_store(store) as opened:
        requests = opened.requests().requests
    by_age = sorted(requests, key=lambda request: request.created)
    assert [request.hits for request in by_age] == [1, 0]
