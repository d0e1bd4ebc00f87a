"""The wrapper of `generate()`: no effect without a strategy, used wherever one is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, StopStringCriteria

import hf_spec
from hf_spec import (
    LookupConfig,
    OptionError,
    SpecGenerateOutput,
    TreeConfig,
    UnsupportedError,
    collect_stats,
    truncated_draft,
)
from hf_spec.generation import call_setup
from tests.tiny_models import TIMINGS, VOCAB, build, repetitive_prompt

PROMPT = repetitive_prompt()


@pytest.fixture
def model() -> T.PreTrainedModel:
    """Return a copy of the model whose generation config may be changed."""
    return copy.deepcopy(build("llama"))


@pytest.fixture(scope="module")
def tokenizer() -> T.PreTrainedTokenizerFast:
    """Return a tokenizer in which token i is the character with code 30 + i."""
    from tokenizers import Regex, Tokenizer, decoders
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split

    inner = Tokenizer(WordLevel({chr(30 + i): i for i in range(VOCAB)}, unk_token=chr(30)))
    inner.pre_tokenizer = Split(Regex("."), "isolated")
    inner.decoder = decoders.Fuse()
    return T.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=chr(30), eos_token=chr(32), padding_side="left"
    )


@pytest.fixture
def speculative_calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Record the strategy of every call that is decoded speculatively."""
    seen: list[Any] = []
    works = call_setup.make_drafter

    def make_drafter(config: Any, *args: Any) -> Any:
        seen.append(config)
        return works(config, *args)

    monkeypatch.setattr(call_setup, "make_drafter", make_drafter)
    return seen


class TestEnableAndDisable:
    @pytest.fixture(autouse=True)
    def enabled_again(self) -> Iterator[None]:
        yield
        hf_spec.enable()

    def test_both_are_idempotent(self) -> None:
        wrapper = GenerationMixin.generate
        hf_spec.enable()
        assert GenerationMixin.generate is wrapper
        hf_spec.disable()
        original = GenerationMixin.generate
        assert original is not wrapper
        assert not hasattr(GenerationConfig, "spec_strategy")
        hf_spec.disable()
        assert GenerationMixin.generate is original
        hf_spec.enable()
        assert GenerationMixin.generate is not original
        assert hf_spec.generation.hook.GenerationMixin.generate.__wrapped__ is original

    def test_existing_instances_follow(self, model: T.PreTrainedModel) -> None:
        hf_spec.disable()
        with pytest.raises(ValueError, match="not used by the model"):
            model.generate(PROMPT, spec_strategy="lookup", max_new_tokens=2)
        hf_spec.enable()
        model.generate(PROMPT, spec_strategy="lookup", max_new_tokens=2)

    def test_without_a_strategy_the_original_gets_its_arguments_untouched(
        self, model: T.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hf_spec.disable()
        seen = []

        def original(self: Any, *args: Any, **kwargs: Any) -> str:
            seen.append((self, args, kwargs))
            return "what the original returns"

        monkeypatch.setattr(GenerationMixin, "generate", original)
        hf_spec.enable()
        config, extra = GenerationConfig(), object()
        result = model.generate(PROMPT, config, odd=extra, top_k=3)
        hf_spec.disable()
        assert result == "what the original returns"
        ((called, args, kwargs),) = seen
        assert called is model
        assert args[0] is PROMPT
        assert args[1] is config
        assert kwargs == {"odd": extra, "top_k": 3}

    def test_without_a_strategy_the_output_is_bit_identical(self, model: T.PreTrainedModel) -> None:
        call = {"max_new_tokens": 9, "return_dict_in_generate": True, "output_logits": True}
        wrapped = model.generate(PROMPT, **call)
        hf_spec.disable()
        plain = model.generate(PROMPT, **call)
        assert type(wrapped) is type(plain)
        assert torch.equal(wrapped.sequences, plain.sequences)
        for ours, theirs in zip(wrapped.logits, plain.logits, strict=True):
            assert torch.equal(ours, theirs)

    def test_the_signature_is_that_of_the_original(self) -> None:
        assert GenerationMixin.generate.__name__ == "generate"
        assert "num_beams" in (GenerationMixin.generate.__doc__ or "")


class TestWhereTheStrategyComesFrom:
    def test_the_call_goes_before_the_given_config_and_that_before_the_models(
        self, model: T.PreTrainedModel, speculative_calls: list[Any]
    ) -> None:
        first, second, third = (LookupConfig(copy_length=n) for n in (1, 2, 3))
        model.generation_config.spec_strategy = third
        given = GenerationConfig(max_new_tokens=3)
        given.spec_strategy = second
        model.generate(PROMPT, given, spec_strategy=first)
        model.generate(PROMPT, given)
        model.generate(PROMPT, GenerationConfig(max_new_tokens=3))
        model.generate(PROMPT, max_new_tokens=3)
        assert speculative_calls == [first, second, third, third]

    def test_none_in_the_config_is_plain(
        self, model: T.PreTrainedModel, speculative_calls: list[Any]
    ) -> None:
        model.generation_config.spec_strategy = "lookup"
        model.generation_config.spec_strategy = None
        model.generate(PROMPT, max_new_tokens=3)
        assert speculative_calls == []

    @pytest.mark.parametrize(
        "value",
        ["lookup", {"strategy": "lookup", "copy_length": 3}, LookupConfig(copy_length=3)],
        ids=["name", "dict", "config"],
    )
    @pytest.mark.parametrize("from_model_config", [True, None])
    def test_a_stored_strategy_survives_saving(
        self,
        value: Any,
        from_model_config: bool | None,
        tmp_path: Path,
        model: T.PreTrainedModel,
        speculative_calls: list[Any],
    ) -> None:
        # SmolLM2's file has `_from_model_config` set, which drops unknown keys.
        config = GenerationConfig(max_new_tokens=4)
        config._from_model_config = from_model_config
        config.spec_strategy = value
        config.save_pretrained(tmp_path)
        json.loads((tmp_path / "generation_config.json").read_text())
        model.generation_config = GenerationConfig.from_pretrained(tmp_path)
        model.generate(PROMPT)
        (used,) = speculative_calls
        assert used == (LookupConfig() if value == "lookup" else LookupConfig(copy_length=3))

    def test_a_model_saves_it_with_its_weights(
        self, model: T.PreTrainedModel, tmp_path: Path, speculative_calls: list[Any]
    ) -> None:
        model.generation_config.spec_strategy = "lookup"
        model.save_pretrained(tmp_path)
        loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path)
        plain = loaded.generate(PROMPT, max_new_tokens=8)
        assert speculative_calls == [LookupConfig()]
        loaded.generation_config.spec_strategy = None
        assert torch.equal(loaded.generate(PROMPT, max_new_tokens=8), plain)

    def test_copies_of_a_config_keep_it(self) -> None:
        config = GenerationConfig()
        config.spec_strategy = "lookup"
        assert copy.deepcopy(config).spec_strategy == "lookup"
        assert GenerationConfig().spec_strategy is None
        assert "spec_strategy" not in GenerationConfig().to_dict()


class TestStoredAssistants:
    @pytest.fixture
    def folder(self, model: T.PreTrainedModel, tmp_path: Path) -> Path:
        truncated_draft(model, 2).save_pretrained(tmp_path / "draft")
        return tmp_path / "draft"

    def test_tools_that_only_make_a_config_can_name_one(
        self, model: T.PreTrainedModel, folder: Path
    ) -> None:
        plain = model.generate(PROMPT, max_new_tokens=9)
        for assistant in (folder, str(folder), [folder]):
            strategy = {"strategy": "auto", "timings": TIMINGS}
            given = GenerationConfig(max_new_tokens=9, spec_strategy=strategy, assistant=assistant)
            with collect_stats() as stats:
                assert torch.equal(model.generate(PROMPT, generation_config=given), plain)
            assert stats[0].draft_forwards > 0

    def test_it_is_saved_with_the_model(
        self, model: T.PreTrainedModel, folder: Path, tmp_path: Path
    ) -> None:
        model.generation_config.spec_strategy = "draft"
        model.generation_config.assistant = folder
        model.save_pretrained(tmp_path / "target")
        loaded = T.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
        assert loaded.generation_config.assistant == str(folder)
        with collect_stats() as stats:
            loaded.generate(PROMPT, max_new_tokens=9)
        assert stats[0].draft_forwards > 0

    def test_it_goes_with_the_stored_strategy_alone(
        self, model: T.PreTrainedModel, folder: Path
    ) -> None:
        plain = model.generate(PROMPT, max_new_tokens=9)
        model.generation_config.spec_strategy = "draft"
        model.generation_config.assistant = folder
        with collect_stats() as stats:
            assert torch.equal(
                model.generate(PROMPT, max_new_tokens=9, spec_strategy="lookup"), plain
            )
            model.generate(PROMPT, max_new_tokens=9, assistant=truncated_draft(model, 1))
            model.generate_batch([PROMPT[0].tolist()], max_new_tokens=9)
        assert [one.draft_forwards > 0 for one in stats] == [False, True, True]
        (ended,) = model.generate_batch_iter([PROMPT[0].tolist()], max_new_tokens=9)
        assert ended.spec_stats.drafted_tokens > 0
        model.generation_config.spec_strategy = None
        assert torch.equal(model.generate(PROMPT, max_new_tokens=9), plain)

    def test_objects_reach_models_that_move_arguments_into_a_config(
        self, model: T.PreTrainedModel
    ) -> None:
        """Whisper's own `generate()` does this before it calls this one."""
        config = GenerationConfig(max_new_tokens=9)
        given = {"spec_strategy": "draft", "assistant": truncated_draft(model, 2)}
        left = config.update(**given)
        with collect_stats() as stats:
            model.generate(PROMPT, generation_config=config, **left)
        assert stats[0].draft_forwards > 0

    def test_objects_are_refused(self, model: T.PreTrainedModel) -> None:
        for given in (model, [model], 3):
            with pytest.raises(OptionError, match="stores folders and Hub ids"):
                model.generation_config.assistant = given


class TestAssistedDecodingOfTransformers:
    """Assisted generation of transformers never uses a stored strategy."""

    def assisted(self, target: T.PreTrainedModel, draft: T.PreTrainedModel) -> Tensor:
        return target.generate(PROMPT, assistant_model=draft, max_new_tokens=8)

    def test_a_strategy_stored_on_the_assistant_is_not_used(
        self, model: T.PreTrainedModel, speculative_calls: list[Any]
    ) -> None:
        draft = copy.deepcopy(model)
        plain = model.generate(PROMPT, max_new_tokens=8)
        draft.generation_config.spec_strategy = "lookup"
        assert torch.equal(self.assisted(model, draft), plain)
        assert speculative_calls == []

    def test_a_strategy_stored_on_the_target_is_a_contradiction(
        self, model: T.PreTrainedModel
    ) -> None:
        model.generation_config.spec_strategy = "lookup"
        with pytest.raises(UnsupportedError, match=r"generation_config.spec_strategy = None"):
            self.assisted(model, copy.deepcopy(build("llama")))

    def test_an_assistant_config_is_never_served(
        self, model: T.PreTrainedModel, speculative_calls: list[Any]
    ) -> None:
        config = GenerationConfig(is_assistant=True, max_new_tokens=3)
        config.update(return_dict_in_generate=True, output_scores=True)
        config.spec_strategy = "lookup"
        model.generate(PROMPT, config)
        assert speculative_calls == []


class TestCallers:
    def test_a_class_whose_own_generate_calls_super(self) -> None:
        class Wordy(T.LlamaForCausalLM):
            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return super().generate(*args, **{"max_new_tokens": 7, **kwargs})

        wordy = Wordy(build("llama").config).eval()
        wordy.load_state_dict(build("llama").state_dict())
        assert torch.equal(wordy.generate(PROMPT, spec_strategy="lookup"), wordy.generate(PROMPT))

    @pytest.mark.parametrize("call", ["keyword", "stored"])
    def test_peft_models(
        self, call: str, model: T.PreTrainedModel, speculative_calls: list[Any]
    ) -> None:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        wrapped = get_peft_model(
            model, LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
        ).eval()
        settings = {"input_ids": PROMPT, "max_new_tokens": 12}
        plain = wrapped.generate(**settings)
        assert not torch.equal(plain, build("llama").generate(**settings))
        if call == "stored":
            wrapped.generation_config.spec_strategy = "lookup"
            drafted = wrapped.generate(**settings)
        else:
            drafted = wrapped.generate(**settings, spec_strategy="lookup")
        assert torch.equal(drafted, plain)
        assert len(speculative_calls) == 1

    @pytest.mark.parametrize("default", ["meta", torch.float64, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
    def test_default_devices_and_dtypes_do_not_matter(
        self, default: Any, sampled: bool, model: T.PreTrainedModel
    ) -> None:
        call = {"max_new_tokens": 12, "do_sample": sampled, "spec_strategy": "tree"}
        call["assistant"] = build("llama")

        def outputs() -> list[list[int]]:
            torch.manual_seed(0)
            [batch] = model.generate_batch(PROMPT.tolist(), **call).values()
            return [model.generate(PROMPT, **call)[0].tolist(), batch.generated_tokens]

        expected = outputs()
        set_default = torch.set_default_device if default == "meta" else torch.set_default_dtype
        set_default(default)
        try:
            assert outputs() == expected
        finally:
            torch.set_default_device(None)
            torch.set_default_dtype(torch.float32)

    def test_a_peft_model_drafts_for_another(self, model: T.PreTrainedModel) -> None:
        from peft import LoraConfig, get_peft_model

        draft = get_peft_model(model, LoraConfig(r=2, task_type="CAUSAL_LM")).eval()
        target = build("llama")
        drafted = target.generate(
            PROMPT, max_new_tokens=9, spec_strategy=TreeConfig(), assistant=draft
        )
        assert torch.equal(drafted, target.generate(PROMPT, max_new_tokens=9))

    @pytest.mark.parametrize("call", ["keyword", "stored"])
    def test_the_pipeline(
        self, call: str, model: T.PreTrainedModel, tokenizer: Any, speculative_calls: list[Any]
    ) -> None:
        text = tokenizer.decode(PROMPT[0])
        settings = {"max_new_tokens": 9, "return_full_text": False, "do_sample": False}
        plain = T.pipeline("text-generation", model=model, tokenizer=tokenizer)(text, **settings)
        assert speculative_calls == []
        if call == "stored":
            model.generation_config.spec_strategy = "lookup"
        else:
            settings["spec_strategy"] = "lookup"
        pipe = T.pipeline("text-generation", model=model, tokenizer=tokenizer)
        assert pipe(text, **settings) == plain
        assert len(speculative_calls) == 1
        # A batch, padded by the pipeline.
        texts = [text, text[:4]]
        batched = pipe(texts, batch_size=2, **settings)
        assert batched[0] == plain

    def test_positional_arguments(self, model: T.PreTrainedModel) -> None:
        config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.3)

        def flip(input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.roll(1, dims=-1)

        args = (PROMPT, config, [flip], [lambda ids, scores: ids.shape[1] > 27])
        drafted = model.generate(*args, spec_strategy="lookup")
        assert torch.equal(drafted, model.generate(*args))
        assert drafted.shape[1] == 28


class TestStopStrings:
    @pytest.fixture
    def stop(self, model: T.PreTrainedModel, tokenizer: Any) -> str:
        """Return two characters from the middle of the output."""
        return tokenizer.decode(model.generate(PROMPT, max_new_tokens=12)[0, 21 + 6 : 21 + 8])

    @pytest.mark.parametrize("where", ["call", "generation_config", "model"])
    def test_from_every_place(
        self, where: str, model: T.PreTrainedModel, tokenizer: Any, stop: str
    ) -> None:
        call: dict[str, Any] = {"tokenizer": tokenizer, "max_new_tokens": 12}
        if where == "call":
            call["stop_strings"] = [stop]
        elif where == "model":
            model.generation_config.stop_strings = [stop]
        else:
            call["generation_config"] = GenerationConfig(stop_strings=stop, max_new_tokens=12)
        plain = model.generate(PROMPT, **call)
        drafted = model.generate(PROMPT, **call, spec_strategy="lookup")
        assert torch.equal(drafted, plain)
        assert plain.shape[1] < 21 + 12

    def test_without_a_tokenizer(self, model: T.PreTrainedModel) -> None:
        with pytest.raises(OptionError, match=r"stop_strings=\['a'\] need the model's tokenizer"):
            model.generate(PROMPT, stop_strings=["a"], spec_strategy="lookup")

    def test_a_criterion_of_the_caller_goes_before_the_setting(
        self, model: T.PreTrainedModel, tokenizer: Any, stop: str
    ) -> None:
        own = StopStringCriteria(tokenizer, ["~~~"])
        call = {"stop_strings": [stop], "stopping_criteria": [own], "tokenizer": tokenizer}
        plain = model.generate(PROMPT, max_new_tokens=12, **call)
        drafted = model.generate(PROMPT, max_new_tokens=12, spec_strategy="lookup", **call)
        assert torch.equal(drafted, plain)
        assert plain.shape[1] == 21 + 12

    def test_a_tokenizer_alone_changes_nothing(
        self, model: T.PreTrainedModel, tokenizer: Any
    ) -> None:
        model.generate(PROMPT, max_new_tokens=3, tokenizer=tokenizer, spec_strategy="lookup")


class TestOutputs:
    def test_the_streamer_gets_every_token_once_and_in_order(
        self, model: T.PreTrainedModel
    ) -> None:
        class Collect:
            def __init__(self) -> None:
                self.tokens: list[int] = []
                self.ended = 0

            def put(self, value: Tensor) -> None:
                assert self.ended == 0
                self.tokens.extend(value.flatten().tolist())

            def end(self) -> None:
                self.ended += 1

        streamer = Collect()
        out = model.generate(PROMPT, max_new_tokens=12, streamer=streamer, spec_strategy="lookup")
        assert streamer.tokens == out[0].tolist()
        assert streamer.ended == 1

    def test_the_text_streamer(self, model: T.PreTrainedModel, tokenizer: Any) -> None:
        def text(**strategy: Any) -> str:
            streamer = T.TextIteratorStreamer(tokenizer, skip_prompt=True)
            model.generate(PROMPT, max_new_tokens=12, streamer=streamer, **strategy)
            return "".join(streamer)

        assert text(spec_strategy="lookup") == text()

    def test_num_return_sequences(self, model: T.PreTrainedModel) -> None:
        call = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 6}
        out = model.generate(PROMPT, **call, spec_strategy="lookup")
        assert out.shape == (3, 27)
        assert torch.equal(out[:, :21], PROMPT.expand(3, -1))
        # With top_k=1 sampling is deterministic.
        call["top_k"] = 1
        assert torch.equal(
            model.generate(PROMPT, **call, spec_strategy="lookup"), model.generate(PROMPT, **call)
        )

    def test_a_tensor_or_an_output_object(self, model: T.PreTrainedModel) -> None:
        call = {"max_new_tokens": 4, "spec_strategy": "lookup"}
        assert isinstance(model.generate(PROMPT, **call), Tensor)
        out = model.generate(PROMPT, return_dict_in_generate=True, **call)
        assert isinstance(out, SpecGenerateOutput)
        assert out.spec_stats.target_forwards >= 1
