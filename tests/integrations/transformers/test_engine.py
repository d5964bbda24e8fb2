from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Unpack

import pytest
import torch
from transformers import (
    BatchEncoding,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutputWithPast

import persistkv
from persistkv import Engine
from persistkv.base import TransferResult
from persistkv.connector.worker import OffloadingConnectorWorker
from persistkv.errors import (
    ConfigurationError,
    EngineClosedError,
    PromptTooLongError,
    UnsupportedModelError,
)
from tests.integrations.transformers.conftest import EngineOptions, OpenEngine


@pytest.fixture
def open_engine(model: PreTrainedModel) -> Iterator[OpenEngine]:
    opened = []

    def open_one(
        chosen: PreTrainedModel | None = None,
        **options: Unpack[EngineOptions],
    ) -> Engine:
        defaults: EngineOptions = {
            "block_size": 4,
            "device_blocks": 64,
            "cpu_bytes": "1MiB",
        }
        opened.append(Engine.open(chosen or model, **(defaults | options)))
        return opened[-1]

    yield open_one
    for engine in opened:
        engine.close()


def reference(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers itself generates."""
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


class TestGenerate:
    def test_cold_or_resident_prefix_returns_tokens_of_transformers(
        self,
        open_engine: OpenEngine,
        model: PreTrainedModel,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        expected = reference(model, prompt, 24)
        assert engine.generate(prompt, 24).tokens == expected
        assert engine.generate(prompt, 24).tokens == expected

    def test_gpt_neox_model_returns_tokens_of_transformers(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        torch.manual_seed(0)
        config = GPTNeoXConfig(
            vocab_size=256,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            bos_token_id=None,
            eos_token_id=None,
            initializer_range=0.2,
        )
        neox = GPTNeoXForCausalLM(config).eval()
        engine = open_engine(neox)
        expected = reference(neox, prompt, 12)
        assert [engine.generate(prompt, 12).tokens for _ in range(2)] == [
            expected,
            expected,
        ]

    def test_computed_resident_or_restored_prefix_returns_same_tokens(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        cold = engine.generate(prompt, 8, load=False)
        resident = engine.generate(prompt, 8)
        engine.forget_device()
        restored = engine.generate(prompt, 8)
        assert (cold.stats.computed_tokens, cold.stats.restored_tokens) == (100, 0)
        assert (resident.stats.device_tokens, resident.stats.computed_tokens) == (96, 4)
        assert (restored.stats.cpu_tokens, restored.stats.computed_tokens) == (96, 4)
        assert restored.stats.bytes_loaded == 24 * engine.stats().block_bytes
        assert torch.equal(resident.logits, restored.logits)
        assert cold.tokens == resident.tokens == restored.tokens
        torch.testing.assert_close(cold.logits, resident.logits, rtol=1e-4, atol=1e-4)

    def test_sampling_seed_determines_tokens(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        drawn = [
            engine.generate(prompt, 12, temperature=1.0, seed=seed).tokens
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]

    def test_stop_token_ends_answer(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        whole = engine.generate(prompt, 12).tokens
        stopped = engine.generate(prompt, 12, stop_token_ids={whole[5]}).tokens
        assert stopped == whole[: whole.index(whole[5]) + 1]

    def test_prompt_of_at_most_two_blocks_returns_tokens_of_transformers(
        self,
        open_engine: OpenEngine,
        model: PreTrainedModel,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        for length in (1, 3, 4, 5, 8):
            expected = reference(model, prompt[:length], 6)
            assert [engine.generate(prompt[:length], 6).tokens for _ in range(2)] == [
                expected,
                expected,
            ]

    def test_later_request_leaves_returned_logits_unchanged(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        first = engine.generate(prompt, 2)
        kept = first.logits.clone()
        engine.generate(prompt[::-1], 2)
        assert torch.equal(first.logits, kept)


class TestPrefixCache:
    def test_prompt_with_generated_tokens_restores_their_blocks(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        result = engine.generate(prompt, 12)
        stats = engine.generate([*prompt, *result.tokens, 1], 1).stats
        assert stats.restored_tokens == 108

    def test_common_prefix_is_reused_from_device(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(prompt, 1)
        assert engine.generate([*prompt[:50], 255, 255], 1).stats.device_tokens == 48

    def test_prefix_partly_evicted_from_device_loads_rest_from_cpu_tier(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine(device_blocks=27)
        expected = engine.generate(prompt, 8).tokens
        engine.generate([200, 201, 202, 203] * 10, 1)
        stats = engine.generate(prompt, 8)
        assert stats.stats.device_tokens > 0
        assert stats.stats.cpu_tokens > 0
        assert stats.stats.restored_tokens == 96
        assert stats.tokens == expected

    def test_different_tenant_misses_on_device_and_in_primary_tier(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        assert engine.generate(prompt, 1, tenant="anna").stats.restored_tokens == 0
        for tenant in ("berta", None):
            other = engine.generate(prompt, 1, tenant=tenant).stats
            assert other.restored_tokens == 0
        again = engine.generate(prompt, 1, tenant="anna").stats
        assert again.restored_tokens == 96
        assert again.device_tokens > 0
        engine.forget_device()
        assert engine.generate(prompt, 1, tenant="clara").stats.restored_tokens == 0
        parameters = {"persistkv": {"tenant": "anna"}}
        named = engine.generate(prompt, 1, kv_transfer_params=parameters)
        assert named.stats.cpu_tokens == 96

    def test_different_salt_misses(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(prompt, 1, salt="one")
        assert engine.generate(prompt, 1, salt="two").stats.restored_tokens == 0
        assert engine.generate(prompt, 1, salt="one").stats.restored_tokens == 96

    def test_request_parameter_load_false_misses(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(prompt, 1)
        params = {"persistkv": {"load": False}}
        assert (
            engine.generate(prompt, 1, kv_transfer_params=params).stats.restored_tokens
            == 0
        )

    def test_store_false_stores_no_blocks(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        engine.generate(prompt, 1, store=False)
        engine.generate(
            prompt[::-1], 1, kv_transfer_params={"persistkv": {"store": False}}
        )
        assert engine.flush()
        assert engine.stats().connector.stored_blocks == 0

    @pytest.mark.parametrize(
        "given",
        [
            "off",
            {"stores": False},
            {"load": "never"},
            {"labels": {"user": 1}},
            {"ttl": "soon"},
            {"priority": "high"},
        ],
    )
    def test_invalid_request_parameters_raise_before_running(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
        given: object,
    ) -> None:
        engine = open_engine()
        with pytest.raises(ConfigurationError, match=r"kv_transfer_params\.persistkv"):
            engine.generate(prompt, 1, kv_transfer_params={"persistkv": given})
        assert engine.stats().requests == 0

    def test_repeated_prompt_stores_each_block_once(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        for _ in range(3):
            engine.generate(prompt, 1, load=False)
        assert engine.flush()
        assert engine.stats().connector.stored_blocks == 25
        assert engine.stats().resident_blocks == 25

    def test_restored_pages_equal_computed_pages_of_same_hash(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        engine = open_engine()
        result = engine.generate(prompt, 8)
        before = {
            block_hash: page.clone()
            for block_hash, page in engine.resident_pages().items()
        }
        assert set(before) == set(result.block_hashes)
        engine.forget_device()
        assert engine.resident_pages() == {}
        engine.generate(prompt, 8)
        after = engine.resident_pages()
        assert all(
            torch.equal(after[block_hash], before[block_hash])
            for block_hash in result.block_hashes[:24]
        )


class TestPressureAndFaults:
    def test_generate_small_device_pool_returns_tokens_of_transformers(
        self,
        open_engine: OpenEngine,
        model: PreTrainedModel,
    ) -> None:
        engine = open_engine(device_blocks=12, cpu_bytes="64KiB")
        for number in range(30):
            prompt = [(number % 3 * 50 + index * 5) % 256 for index in range(36)]
            assert engine.generate(prompt, 8).tokens == reference(model, prompt, 8)
        assert engine.stats().resident_blocks <= 12

    def test_generate_small_cpu_tier_drops_and_counts_blocks(
        self,
        open_engine: OpenEngine,
        model: PreTrainedModel,
        prompt: list[int],
    ) -> None:
        engine = open_engine(cpu_bytes="20KiB")
        assert engine.generate(prompt, 8).tokens == reference(model, prompt, 8)
        assert engine.flush()
        assert engine.stats().connector.dropped_blocks > 0

    def test_generate_failed_load_recomputes_prompt(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        engine = open_engine()
        expected = engine.generate(prompt, 8)
        engine.forget_device()
        finished = OffloadingConnectorWorker.get_finished

        def failing(worker: OffloadingConnectorWorker) -> list[TransferResult]:
            return [TransferResult(result.job_id, False) for result in finished(worker)]

        monkeypatch.setattr(OffloadingConnectorWorker, "get_finished", failing)
        result = engine.generate(prompt, 8)
        assert result.tokens == expected.tokens
        assert (result.stats.restored_tokens, result.stats.computed_tokens) == (0, 100)
        assert engine.stats().connector.failed_loads == 1
        monkeypatch.undo()
        assert engine.generate(prompt, 8).stats.device_tokens == 96

    def test_generate_model_error_releases_device_blocks(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        engine = open_engine()
        forward = engine.model.forward

        def failing(**inputs: torch.Tensor) -> CausalLMOutputWithPast:
            if inputs["input_ids"].shape[1] == 1:
                raise ZeroDivisionError
            return forward(**inputs)

        with monkeypatch.context() as patch:
            patch.setattr(engine.model, "forward", failing)
            with pytest.raises(ZeroDivisionError):
                engine.generate(prompt, 4)
        assert engine.flush()
        assert len(engine.generate(prompt * 2 + prompt[:52], 5).block_hashes) == 64, (
            "all device blocks are available"
        )


class TestInvalidInput:
    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"block_size": 0}, "block_size"),
            ({"block_size": "16"}, "block_size: '16' is not valid; expected an int"),
            ({"device_blocks": -1}, "device_blocks"),
            ({"device_blocks": "4"}, "device_blocks: '4' is not valid; expected an"),
            ({"cpu_bytes": "much"}, "cpu_bytes"),
            ({"cpu_bytes": None}, "cpu_bytes: None is not valid; expected a pos"),
            ({"store": 5}, "store: 5 is not valid; expected a URL or a path"),
            ({"store": [5]}, "store: 5 is not valid; expected a URL or a path"),
            ({"codec": 5}, "codec: 5 is not valid; expected text"),
            ({"required": "no"}, "required: 'no' is not valid; expected True or False"),
            ({"strict_identity": 1}, "strict_identity: 1 is not valid; expected True"),
            ({"lookup_deadline_s": "1"}, "lookup_deadline_s: '1' is not valid"),
            ({"prewarm_share": 5}, "prewarm_share: 5 is not valid; .* 1 at most"),
            ({"dtype": "bfloat16"}, "dtype: .* a model that is loaded here"),
            ({"cpu_bytes": 100}, "cpu_bytes: 100 is"),
            ({"cpu_bytes": "1000TiB"}, "cpu_bytes: 1099511627776000 is"),
            ({"store": "nowhere"}, "url"),
            ({"store": "tape:///kv"}, "lmdb"),
            ({"store": "lmdb:///dev/shm/none", "codec": "brotli"}, "codec"),
            ({"store": "lmdb:///dev/shm/none", "host": "cloud"}, "host"),
        ],
    )
    def test_open_invalid_option_raises_naming_it(
        self,
        open_engine: OpenEngine,
        options: dict[str, object],
        field: str,
    ) -> None:
        with pytest.raises(ConfigurationError, match=field):
            open_engine(**options)

    @pytest.mark.parametrize(
        ("token_ids", "named"),
        [
            ([], "no tokens"),
            ([256], "256 at position 0"),
            ([5, -1], "-1 at position 1"),
            ([3, 4, 10_000], "10000 at position 2"),
        ],
    )
    def test_generate_empty_prompt_or_unknown_token_raises(
        self,
        open_engine: OpenEngine,
        token_ids: list[int],
        named: str,
    ) -> None:
        with pytest.raises(ConfigurationError, match=f"{named}.*from 0 to 255"):
            open_engine().generate(token_ids, 1)

    def test_generate_token_that_is_no_integer_raises_naming_it(
        self,
        open_engine: OpenEngine,
    ) -> None:
        wrong: Any = [1, 2, "three"]
        with pytest.raises(ConfigurationError, match="'three' at position 2"):
            open_engine().generate(wrong, 1)

    def test_generate_label_that_is_too_long_raises(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        with pytest.raises(ConfigurationError, match=r"at most 4,096 .*, not 5,004"):
            open_engine().generate(prompt, 1, labels={"user": "a" * 5000})

    def test_generate_stop_token_out_of_range_raises_naming_it(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        with pytest.raises(ConfigurationError, match="300 is none"):
            open_engine().generate(prompt, 1, stop_token_ids=[2, 300])

    @pytest.mark.parametrize(
        ("name", "value", "expected"),
        [
            ("max_new_tokens", 0, "an integer, 1 or more"),
            ("max_new_tokens", "8", "an integer, 1 or more"),
            ("max_new_tokens", True, "an integer, 1 or more"),
            ("temperature", -1, "a number, 0 or more"),
            ("temperature", "0.7", "a number, 0 or more"),
            ("temperature", float("nan"), "a number, 0 or more"),
            ("top_p", 2, "a number above 0, 1 at most"),
            ("top_p", 0, "a number above 0, 1 at most"),
            ("top_k", 1.5, "an integer, 0 or more"),
            ("seed", "a", "an integer from"),
            ("seed", 1 << 64, "an integer from"),
            ("stop_token_ids", 5, "token ids from 0 to 255"),
            ("stop_token_ids", "ab", "token ids from 0 to 255"),
            ("stop_token_ids", [256], "token ids from 0 to 255"),
            ("labels", ["a"], "names and values that are text"),
            ("labels", {"user": 1}, "names and values that are text"),
            ("salt", 5, "text"),
            ("tenant", 5, "1 to 128 characters"),
            ("tenant", "", "1 to 128 characters"),
            ("tenant", "a\nb", "1 to 128 characters"),
            ("load", "no", "True or False"),
            ("store", 5, "True or False"),
            ("kv_transfer_params", 5, "a mapping"),
            ("max_tokens", 5, "one of kv_transfer_params, labels, load"),
            ("max_new_token", 5, "one of kv_transfer_params, labels, load"),
        ],
    )
    def test_generate_invalid_option_raises_before_running(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
        name: str,
        value: object,
        expected: str,
    ) -> None:
        engine = open_engine()
        given: dict[str, Any] = {name: value}
        with pytest.raises(ConfigurationError) as error:
            engine.generate(prompt, **given)
        assert error.value.field == name
        assert error.value.value is value
        assert error.value.expected.startswith(expected)
        assert engine.stats().requests == 0

    @pytest.mark.parametrize(
        ("name", "similar"),
        [("max_new_token", "max_new_tokens"), ("temprature", "temperature")],
    )
    def test_generate_misspelt_option_raises_naming_the_similar_one(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
        name: str,
        similar: str,
    ) -> None:
        given: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigurationError, match=rf"did you mean {similar}\?$"):
            open_engine().generate(prompt, **given)

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("unknown_keyword", "expected one of attn_implementation, block_size, "),
            ("blok_size", r"did you mean block_size\?$"),
        ],
    )
    def test_open_unknown_option_raises_naming_similar_ones(
        self,
        model: PreTrainedModel,
        name: str,
        text: str,
    ) -> None:
        given: dict[str, Any] = {name: 1}
        with pytest.raises(ConfigurationError, match=rf"{name}: 1 is not .*{text}"):
            Engine.open(model, **given)

    @pytest.mark.parametrize("request_id", ["typo", 5, None])
    def test_wait_persisted_unknown_request_raises(
        self,
        open_engine: OpenEngine,
        request_id: Any,
    ) -> None:
        with pytest.raises(ConfigurationError, match=r"request: .*of this engine"):
            open_engine().wait_persisted(request_id)

    @pytest.mark.parametrize("method", ["flush", "close"])
    def test_timeout_that_is_no_number_raises(
        self,
        open_engine: OpenEngine,
        method: str,
    ) -> None:
        with pytest.raises(ConfigurationError, match="timeout_s: '1' is not valid"):
            getattr(open_engine(), method)("1")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"dtype": "bf16"}, "dtype: 'bf16' is not valid; .*bfloat16"),
            ({"dtype": torch.int8}, "dtype: torch.int8 is not valid; .*bfloat16"),
            ({"device": "gpu"}, "device: 'gpu' is not valid; expected a device of"),
            ({"attn_implementation": "none"}, "attn_implementation: 'none' is not"),
            ({"attn_implementation": 5}, "attn_implementation: 5 is not valid"),
        ],
    )
    def test_open_checkpoint_invalid_option_raises_naming_it(
        self,
        model: PreTrainedModel,
        tmp_path: Path,
        options: dict[str, Any],
        message: str,
    ) -> None:
        model.save_pretrained(tmp_path)
        with pytest.raises(ConfigurationError, match=message):
            Engine.open(tmp_path, **options)

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
    def test_open_cuda_without_gpu_raises_before_loading_model(
        self,
        tmp_path: Path,
    ) -> None:
        with pytest.raises(ConfigurationError, match="device: 'cuda' is not valid"):
            Engine.open(tmp_path / "no-model", device="cuda")

    @pytest.mark.parametrize("model", [None, 5])
    def test_open_no_model_raises(self, model: Any) -> None:
        with pytest.raises(ConfigurationError, match=r"model: .* a checkpoint's dir"):
            Engine.open(model)

    def test_open_compiled_model_raises_naming_compile_in_place(
        self,
        model: PreTrainedModel,
    ) -> None:
        compiled = torch.compile(model, backend="eager")
        with pytest.raises(ConfigurationError, match=r"model\.compile\(\) compiles"):
            Engine.open(compiled)

    def test_generate_context_larger_than_device_raises(
        self,
        open_engine: OpenEngine,
        prompt: list[int],
    ) -> None:
        with pytest.raises(PromptTooLongError, match=r"device_blocks=27") as error:
            open_engine(device_blocks=26).generate(prompt, 8)
        assert (error.value.tokens, error.value.limit, error.value.needed) == (
            len(prompt) + 8,
            107,
            27,
        )
        assert pickle.loads(pickle.dumps(error.value)).needed == 27  # noqa: S301

    def test_open_directory_without_model_raises(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigurationError, match="model"):
            Engine.open(tmp_path)

    def test_open_model_with_shared_kv_layers_raises(
        self,
        open_engine: OpenEngine,
        make_model: Callable[..., LlamaForCausalLM],
    ) -> None:
        model = make_model()
        model.config.num_kv_shared_layers = 1
        with pytest.raises(UnsupportedModelError, match="shares"):
            open_engine(model)


def test_close_twice_succeeds_and_generate_raises(
    open_engine: OpenEngine,
    prompt: list[int],
) -> None:
    engine = open_engine()
    engine.generate(prompt, 1)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError, match="closed"):
        engine.generate(prompt, 1)


@pytest.mark.parametrize(
    "form", [torch.tensor, lambda ids: torch.tensor([ids]), lambda ids: [ids], tuple]
)
def test_generate_prompt_in_any_form_returns_same_tokens(
    open_engine: OpenEngine,
    prompt: list[int],
    form: Callable[[list[int]], Any],
) -> None:
    engine = open_engine()
    expected = engine.generate(prompt, 4).tokens
    assert engine.generate(form(prompt), 4).tokens == expected
    assert (
        engine.generate(
            BatchEncoding({"input_ids": form(prompt), "attention_mask": None}), 4
        ).tokens
        == expected
    )


@pytest.mark.parametrize(
    "prompts", [[[1, 2], [3, 4]], torch.tensor([[1, 2], [3, 4]]), ["one", "two"]]
)
def test_generate_batch_raises_that_batches_are_not_supported(
    open_engine: OpenEngine,
    prompts: Any,
) -> None:
    with pytest.raises(
        ConfigurationError, match=r"a batch of 2 prompts.*batches are not supported"
    ):
        open_engine().generate(prompts, 4)


@pytest.mark.parametrize(
    "prompt", [None, 5, [1.5], [None], {1}, {"text": "a"}, torch.tensor(5)]
)
def test_generate_value_that_is_no_prompt_raises(
    open_engine: OpenEngine,
    prompt: Any,
) -> None:
    with pytest.raises(ConfigurationError, match=r"prompt: .* in one row"):
        open_engine().generate(prompt, 4)


@pytest.mark.slow
def test_generate_model_compiled_in_place_returns_tokens_of_transformers(
    open_engine: OpenEngine,
    make_model: Callable[..., LlamaForCausalLM],
) -> None:
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    expected = reference(make_model(num_hidden_layers=1), prompt, 3)
    compiled = make_model(num_hidden_layers=1)
    compiled.compile(backend="eager", dynamic=True)
    assert open_engine(compiled).generate(prompt, 3).tokens == expected


def test_open_unknown_store_raises_before_loading_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'tape' is not valid"):
        Engine.open(tmp_path / "no-model", "tape:///dev/st0")


def test_open_store_path_creates_lmdb_store(
    open_engine: OpenEngine,
    tmp_path: Path,
    prompt: list[int],
) -> None:
    for store in (tmp_path / "kv", str(tmp_path / "kv")):
        engine = open_engine(store=store)
        engine.generate(prompt, 4)
        engine.close()
    assert (tmp_path / "kv" / "data.mdb").exists()


def test_import_persistkv_provides_engine_and_errors() -> None:
    assert persistkv.Engine is Engine
    assert all(hasattr(persistkv, name) for name in persistkv.__all__)
