"""`generate_batch` with a strategy: every sequence as if generated alone, and rejected calls."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
)
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.continuous_batching.requests import GenerationOutput

import hf_spec
from hf_spec import (
    AssistantError,
    BatchStreamer,
    BatchTextStreamer,
    LookupConfig,
    OptionError,
    SpecBatchOutput,
    SpecRequestOutput,
    UnsupportedError,
)
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.registry import parse_strategy
from tests import criteria, tiny_models
from tests.model_watch import count_forwards, snapshot
from tests.tiers import FEW_STRATEGIES

PROMPTS = [
    tiny_models.repetitive_prompt(length, seed=length)[0].tolist() for length in (21, 3, 14, 1, 9)
]


def alone(name: str, prompt: list[int], **options: Any) -> list[int]:
    """Return the new tokens of plain `generate()` for one prompt."""
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, **options}
    ids = torch.tensor([prompt])
    output = tiny_models.build(name).generate(ids, attention_mask=torch.ones_like(ids), **given)
    return output[0, len(prompt) :].tolist()


def together(name: str, strategy: str = "lookup", **options: Any) -> SpecBatchOutput:
    given: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "max_batch": 2, **options}
    model = given.pop("model", tiny_models.build(name))
    return model.generate_batch(PROMPTS, **given, **tiny_models.speculation(name, strategy))


def check(name: str, strategy: str = "lookup", **options: Any) -> SpecBatchOutput:
    outputs = together(name, strategy, **options)
    found = [output.generated_tokens for output in outputs.values()]
    assert found == [alone(name, prompt, **options) for prompt in PROMPTS]
    return outputs


class Counting(LogitsProcessor):
    """Processor with state: it forces the token of rank `calls % 3`."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        likely = scores.argsort(dim=-1, descending=True)[:, self.calls % 3]
        return scores.scatter(1, likely[:, None], float("inf"))


class EndOnRepeat(StoppingCriteria):
    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        assert input_ids.shape[0] == 1
        return (input_ids[:, -11:-1] == input_ids[:, -1:]).sum(dim=1) >= 2


class StopOnEvent(StoppingCriteria):
    def __init__(self) -> None:
        self.event = threading.Event()

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> bool:
        return self.event.is_set()


def ends(name: str) -> list[int]:
    """Return EOS tokens that some prompts generate early."""
    return [alone(name, prompt)[index] for index, prompt in zip((4, 7), PROMPTS, strict=False)]


OPTIONS: dict[str, Any] = {
    "repetition_penalty": lambda name: {"repetition_penalty": 1.3},
    "min_new_tokens": lambda name: {"min_new_tokens": 6, "eos_token_id": ends(name)},
    "encoder_repetition_penalty": lambda name: {"encoder_repetition_penalty": 1.4},
    "no_repeat_ngram": lambda name: {"no_repeat_ngram_size": 2},
    "max_length": lambda name: {"max_new_tokens": None, "max_length": 30},
    "stop_strings": lambda name: {
        "stop_strings": [tiny_models.tokenizer().decode(alone(name, PROMPTS[0])[3:5])],
        "tokenizer": tiny_models.tokenizer(),
    },
    "criterion": lambda name: {"stopping_criteria": StoppingCriteriaList([EndOnRepeat()])},
}


class TestEverySequence:
    @pytest.mark.by_default(strategy=FEW_STRATEGIES)
    @pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
    def test_is_the_same_as_alone(self, strategy: str) -> None:
        outputs = check("gemma3", strategy, eos_token_id=ends("gemma3"))
        assert strategy == "none" or outputs.spec_stats.accepted_tokens > 0
        assert len({len(output.generated_tokens) for output in outputs.values()}) > 1

    # Drafts of auto depend on measured times and on earlier acceptance rates.
    @pytest.mark.by_default(strategy=FEW_STRATEGIES)
    @pytest.mark.parametrize(
        "strategy", [name for name in tiny_models.STRATEGIES if name != "auto"]
    )
    def test_drafts_as_if_nothing_had_been_in_its_place(self, strategy: str) -> None:
        """A drafter that kept state of an earlier sequence would draft different tokens."""
        given = {"max_new_tokens": 12, "do_sample": False, "max_batch": 1}
        given |= tiny_models.speculation("llama", strategy)
        if isinstance(given["spec_strategy"], str):
            # Without fixed sizes, these drafts would depend on measured times too.
            named = {"strategy": strategy}
            fields = vars(parse_strategy(strategy))
            sizes = {"max_draft_tokens": 5, "max_nodes": None}
            given["spec_strategy"] = named | {k: v for k, v in sizes.items() if k in fields}
        model = tiny_models.build("llama")
        after = list(model.generate_batch(PROMPTS[:3], **given).values())
        for prompt, output in zip(PROMPTS[1:3], after[1:], strict=True):
            assert model.generate_batch([prompt], **given)["req_0"].spec_stats == output.spec_stats

    @pytest.mark.by_default(name=("llama",))
    @pytest.mark.parametrize("option", OPTIONS)
    @pytest.mark.parametrize("name", ["llama", "bloom"])
    def test_keeps_its_own_rules(self, name: str, option: str) -> None:
        options = OPTIONS[option](name)
        check(name, **options)
        plain = [alone(name, prompt) for prompt in PROMPTS]
        assert [alone(name, prompt, **options) for prompt in PROMPTS] != plain

    @pytest.mark.parametrize("strategy", ["lookup", "tree"])
    def test_has_processors_that_remember_to_itself(self, strategy: str) -> None:
        expected = [alone("llama", p, logits_processor=[Counting()]) for p in PROMPTS]
        mine = Counting()
        outputs = together("llama", strategy, logits_processor=[mine])
        assert [output.generated_tokens for output in outputs.values()] == expected
        assert mine.calls == 0, "sequences have copies"

    @pytest.mark.by_default(strategy=FEW_STRATEGIES)
    @pytest.mark.parametrize("iterate", [False, True], ids=["batch", "iter"])
    @pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
    def test_has_criteria_that_remember_to_itself(self, strategy: str, iterate: bool) -> None:
        rule = criteria.AfterCalls(7)
        expected = [alone("llama", p, stopping_criteria=[copy.deepcopy(rule)]) for p in PROMPTS]
        given = {"max_new_tokens": 12, "do_sample": False, "max_batch": 3}
        given |= tiny_models.speculation("llama", strategy)
        given["stopping_criteria"] = StoppingCriteriaList([rule])
        model = tiny_models.build("llama")
        if iterate:
            outputs = {o.request_id: o for o in model.generate_batch_iter(PROMPTS, **given)}
        else:
            outputs = model.generate_batch(PROMPTS, **given)
        found = [outputs[f"req_{number}"].generated_tokens for number in range(len(PROMPTS))]
        assert found == expected
        assert {len(tokens) for tokens in found} == {7}
        assert rule.calls == [], "sequences have copies"

    def test_may_be_stopped_from_outside_by_an_event(self) -> None:
        """Copies of the criterion share its event."""
        ended: list[str] = []
        rule = StopOnEvent()
        given = {"max_new_tokens": 12, "do_sample": False, "max_batch": 2}
        for output in tiny_models.build("llama").generate_batch_iter(
            PROMPTS, **given, spec_strategy="lookup", stopping_criteria=[rule]
        ):
            assert (len(output.generated_tokens) == 12) == (len(ended) < 2)
            ended.append(output.request_id)
            if len(ended) > 1:
                rule.event.set()
        assert len(ended) == len(PROMPTS)

    def test_is_known_by_its_number_to_allowed_tokens(self) -> None:
        allowed = [list(range(10 * number, 10 * number + 9)) for number in range(len(PROMPTS))]
        outputs = together("llama", prefix_allowed_tokens_fn=lambda number, _: allowed[number])
        for number, output in enumerate(outputs.values()):
            expected = alone(
                "llama", PROMPTS[number], prefix_allowed_tokens_fn=lambda *_, n=number: allowed[n]
            )
            assert output.generated_tokens == expected
            assert set(output.generated_tokens) <= set(allowed[number])

    def test_counts_padding_tokens_of_its_prompt_as_tokens(self) -> None:
        """Continuous batching does the same; `generate()` without a mask would hide them."""
        prompt = [0, 0, 5, 6, 5, 6]
        output = tiny_models.build("llama").generate_batch(
            [prompt], max_new_tokens=5, do_sample=False, spec_strategy="lookup"
        )
        assert output["req_0"].generated_tokens == alone("llama", prompt, max_new_tokens=5)

    @pytest.mark.parametrize("batching", ["unpadded", "unpadded_kv"])
    def test_may_be_padded_to_the_longest(self, batching: str) -> None:
        config = LookupConfig(batching=batching)
        outputs = tiny_models.build("llama").generate_batch(
            PROMPTS, max_new_tokens=12, do_sample=False, max_batch=3, spec_strategy=config
        )
        found = [output.generated_tokens for output in outputs.values()]
        assert found == [alone("llama", prompt) for prompt in PROMPTS]
        assert (outputs.spec_stats.target_padding > 0) == (batching == "unpadded_kv")

    def test_of_a_peft_model_passes_its_adapter(self) -> None:
        torch.manual_seed(0)
        model = get_peft_model(
            copy.deepcopy(tiny_models.build("llama")), LoraConfig(init_lora_weights=False)
        ).eval()
        ids = torch.tensor([PROMPTS[0]])
        expected = model.generate(input_ids=ids, max_new_tokens=9, do_sample=False)
        outputs = model.generate_batch(
            PROMPTS[:1], max_new_tokens=9, do_sample=False, spec_strategy="lookup"
        )
        assert outputs["req_0"].generated_tokens == expected[0, ids.shape[1] :].tolist()
        assert outputs["req_0"].generated_tokens != alone("llama", PROMPTS[0], max_new_tokens=9)


class TestOutputs:
    def test_are_named_and_ordered_as_those_of_transformers(self) -> None:
        outputs = together("llama", "tree", eos_token_id=ends("llama"))
        assert isinstance(outputs, dict)
        assert list(outputs) == [f"req_{number}" for number in range(len(PROMPTS))]
        for prompt, (request_id, output) in zip(PROMPTS, outputs.items(), strict=True):
            assert isinstance(output, SpecRequestOutput)
            assert isinstance(output, GenerationOutput)
            assert output.request_id == request_id
            assert output.prompt_ids == prompt
            assert output.is_finished()
            assert output.error is None
            assert output.created_time <= output.lifespan[0] < output.lifespan[1]

    def test_carry_the_counts_of_the_sequence_and_of_the_call(self) -> None:
        outputs = together("llama", "tree")
        stats = outputs.spec_stats
        assert [output.spec_stats for output in outputs.values()] == stats.rows
        assert stats.new_tokens == 12 * len(PROMPTS)
        assert stats.target_forwards < sum(row.target_forwards for row in stats.rows)
        assert stats.draft_forwards > 0
        assert stats.counters["rounds"] == sum(row.target_forwards for row in stats.rows)
        assert min(stats.draft_seconds, stats.verify_seconds, stats.other_seconds) > 0

    def test_of_several_sequences_per_prompt(self) -> None:
        torch.manual_seed(3)
        outputs = together("llama", do_sample=True, num_return_sequences=3, temperature=2.0)
        ids = list(outputs)
        assert ids[:3] == ["req_0__child#0", "req_0__child#1", "req_0"]
        assert len(outputs) == 3 * len(PROMPTS)
        assert [outputs[i].prompt_ids for i in ids[:4]] == [*[PROMPTS[0]] * 3, PROMPTS[1]]
        assert len({tuple(outputs[i].generated_tokens) for i in ids[:3]}) == 3

    def test_of_no_prompts_are_none(self) -> None:
        model = tiny_models.build("llama")
        outputs = model.generate_batch([], spec_strategy="lookup")
        assert outputs == {}
        assert outputs.spec_stats.new_tokens == 0
        assert list(model.generate_batch_iter([], spec_strategy="lookup")) == []

    def test_tensors_and_tuples_are_prompts_too(self) -> None:
        kinds = [torch.tensor(PROMPTS[0]), tuple(PROMPTS[1]), torch.tensor(PROMPTS[2]).numpy()]
        outputs = tiny_models.build("llama").generate_batch(
            kinds, max_new_tokens=4, do_sample=False, spec_strategy="none"
        )
        found = [output.generated_tokens for output in outputs.values()]
        assert found == [alone("llama", prompt, max_new_tokens=4) for prompt in PROMPTS[:3]]
        assert [type(token) for token in outputs["req_2"].prompt_ids] == [int] * len(PROMPTS[2])

    def test_a_progress_bar_is_shown_on_request(self, capsys: pytest.CaptureFixture[str]) -> None:
        together("llama")
        assert "request" not in capsys.readouterr().err
        together("llama", progress_bar=True)
        assert f"{len(PROMPTS)}/{len(PROMPTS)}" in capsys.readouterr().err


class TestIterator:
    def outputs(self, strategy: str = "tree", **options: Any) -> Iterator[SpecRequestOutput]:
        return tiny_models.build("llama").generate_batch_iter(
            PROMPTS,
            do_sample=False,
            **{"max_new_tokens": 12, "max_batch": 2, **options},
            **tiny_models.speculation("llama", strategy),
        )

    @pytest.mark.by_default(strategy=FEW_STRATEGIES)
    @pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
    def test_yields_everything_as_it_ends(self, strategy: str) -> None:
        eos = [alone("llama", PROMPTS[1])[0]]
        found = {o.request_id: o for o in self.outputs(strategy, eos_token_id=eos)}
        assert sorted(found) == [f"req_{number}" for number in range(len(PROMPTS))]
        assert next(iter(found)) == "req_1", "it ends with its first token"
        for number, prompt in enumerate(PROMPTS):
            expected = alone("llama", prompt, eos_token_id=eos)
            assert found[f"req_{number}"].generated_tokens == expected

    @pytest.mark.parametrize("strategy", ["sdsat", "falcon", "draft"])
    def test_leaves_the_models_alone_between_outputs(self, strategy: str) -> None:
        model = tiny_models.build("llama")
        assistant = tiny_models.speculation("llama", strategy).get("assistant")
        watched = [model, *([assistant] if isinstance(assistant, type(model)) else [])]
        before = [snapshot(m) for m in watched]
        for output in self.outputs(strategy):
            assert [snapshot(m) for m in watched] == before
            # Between outputs the model may be used, even by another batch.
            other = tiny_models.build("llama").generate_batch_iter(
                PROMPTS[:1], max_new_tokens=3, do_sample=False, spec_strategy="lookup"
            )
            assert next(other).generated_tokens == alone("llama", PROMPTS[0], max_new_tokens=3)
            number = int(output.request_id.removeprefix("req_"))
            assert output.generated_tokens == alone("llama", PROMPTS[number])
        assert torch.is_grad_enabled()

    def test_may_be_left_at_any_point(self) -> None:
        model = tiny_models.build("llama")
        before = snapshot(model)
        outputs = self.outputs()
        next(outputs)
        assert snapshot(model) == before
        outputs.close()  # type: ignore[attr-defined]
        assert list(outputs) == []
        assert snapshot(model) == before

    def test_checks_before_the_first_output_is_asked_for(self) -> None:
        with pytest.raises(OptionError, match="max_batch=0"):
            self.outputs(max_batch=0)

    def test_needs_a_strategy(self) -> None:
        with pytest.raises(OptionError, match="needs spec_strategy"):
            tiny_models.build("llama").generate_batch_iter(PROMPTS)


class TestExceptions:
    @pytest.mark.parametrize("strategy", ["lookup", "sdsat", "draft", "falcon"])
    def test_leave_the_models_as_they_were(self, strategy: str) -> None:
        model = tiny_models.build("llama")
        before = snapshot(model)

        def fail(row: int, tokens: list[int]) -> None:
            if row == 2:
                raise RuntimeError("the reader has gone")

        with pytest.raises(RuntimeError, match="the reader has gone"):
            together("llama", strategy, streamer=BatchStreamer(fail))
        assert snapshot(model) == before
        assert torch.is_grad_enabled()
        check("llama", strategy)

    def test_end_an_iterator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = tiny_models.build("llama")
        outputs = model.generate_batch_iter(
            PROMPTS, max_new_tokens=12, do_sample=False, max_batch=1, spec_strategy="lookup"
        )
        next(outputs)
        before = snapshot(model)
        with monkeypatch.context() as patch:
            patch.setattr(ModelRunner, "keep", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                next(outputs)
        assert snapshot(model) == before
        assert list(outputs) == []


class TestStreaming:
    def test_sequences_are_known_by_their_number(self) -> None:
        tokens: dict[int, list[int]] = {}
        order: list[int] = []
        streamer = BatchStreamer(
            lambda row, new: tokens.setdefault(row, []).extend(new), order.append
        )
        outputs = together("llama", "tree", streamer=streamer, eos_token_id=ends("llama"))
        assert tokens == {i: o.generated_tokens for i, o in enumerate(outputs.values())}
        assert sorted(order) == list(range(len(PROMPTS)))

    def test_text(self) -> None:
        texts = dict.fromkeys(range(len(PROMPTS)), "")

        def take(row: int, text: str, ended: bool) -> None:
            texts[row] += text

        tokenizer = tiny_models.tokenizer()
        outputs = together("llama", streamer=BatchTextStreamer(tokenizer, take))
        for row, output in enumerate(outputs.values()):
            assert texts[row] == tokenizer.decode(output.generated_tokens)


class TestWithoutAStrategy:
    @pytest.fixture(autouse=True)
    def enabled_again(self) -> Iterator[None]:
        yield
        hf_spec.disable()
        hf_spec.enable()

    def test_transformers_own_method_gets_its_arguments_untouched(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen = []

        def original(self: Any, inputs: Any = None, **kwargs: Any) -> str:
            seen.append((self, inputs, kwargs))
            return "what the original returns"

        hf_spec.disable()
        monkeypatch.setattr(ContinuousMixin, "generate_batch", original)
        hf_spec.enable()
        model, extra = tiny_models.build("llama"), object()
        result = model.generate_batch(PROMPTS, progress_bar=True, warmup=False, odd=extra)
        assert result == "what the original returns"
        assert seen == [(model, PROMPTS, {"progress_bar": True, "warmup": False, "odd": extra})]
        hf_spec.disable()

    def test_disable_gives_the_inherited_method_back(self) -> None:
        assert GenerationMixin.generate_batch is not ContinuousMixin.generate_batch
        hf_spec.disable()
        assert GenerationMixin.generate_batch is ContinuousMixin.generate_batch
        assert not hasattr(GenerationMixin, "generate_batch_iter")
        hf_spec.disable()
        hf_spec.enable()
        assert hasattr(GenerationMixin, "generate_batch_iter")

    @pytest.mark.parametrize("given", [{"max_batch": 4}, {"assistant": object()}])
    def test_what_only_a_strategy_understands_is_refused(self, given: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=f"{next(iter(given))}= was given without spec_str"):
            tiny_models.build("llama").generate_batch(PROMPTS, **given)

    def test_a_stored_strategy_counts(self) -> None:
        model = copy.deepcopy(tiny_models.build("llama"))
        model.generation_config.spec_strategy = LookupConfig(copy_length=3)
        outputs = model.generate_batch(PROMPTS, max_new_tokens=4, do_sample=False)
        assert isinstance(outputs, SpecBatchOutput)
        first = next(iter(model.generate_batch_iter(PROMPTS, max_new_tokens=4, do_sample=False)))
        assert isinstance(first, SpecRequestOutput)


def many(length: int) -> list[list[int]]:
    return [[5] * 3, [5] * length, [5] * 4]


@pytest.mark.parametrize(
    ("match", "error", "inputs", "options"),
    [
        ("inputs of type Tensor", OptionError, torch.ones(2, 3).long(), {}),
        ("inputs of type NoneType", OptionError, None, {}),
        ("inputs of type str", OptionError, "text", {}),
        ("prompt 1 is 'two'", OptionError, [[1], "two"], {}),
        (r"prompt 0 is \[\[1, 2\]\]", OptionError, [[[1, 2]]], {}),
        ("prompt 0 is tensor", OptionError, [torch.ones(1, 3).long()], {}),
        ("prompt 0 is tensor", OptionError, [torch.ones(3)], {}),
        (r"prompt 0 is \[1.5\]", OptionError, [[1.5]], {}),
        ("prompt 0 is 7", OptionError, [7], {}),
        ("prompt 1 has no token", UnsupportedError, [[1], []], {}),
        ("prompt 1 has values from 3 to 97", UnsupportedError, [[1], [97, 3]], {}),
        ("prompt 0 has values from -1 to 2", UnsupportedError, [[-1, 2]], {}),
        ("max_batch=0", OptionError, PROMPTS, {"max_batch": 0}),
        ("max_batch=True", OptionError, PROMPTS, {"max_batch": True}),
        ("max_batch='4'", OptionError, PROMPTS, {"max_batch": "4"}),
        (
            "aligns the KV cache",
            OptionError,
            PROMPTS,
            {"spec_strategy": LookupConfig(batching="padded")},
        ),
        ("TextStreamer follows", UnsupportedError, PROMPTS, {"streamer": TextStreamer(None)}),
        ("attention_mask=", UnsupportedError, PROMPTS, {"attention_mask": torch.ones(1, 3)}),
        ("output_scores=", UnsupportedError, PROMPTS, {"output_scores": True}),
        ("persistent_manager=", UnsupportedError, PROMPTS, {"persistent_manager": True}),
        ("num_beams=2", UnsupportedError, PROMPTS, {"num_beams": 2}),
        ("num_return_sequences=2 without", OptionError, PROMPTS, {"num_return_sequences": 2}),
        ("num_return_sequences=-1", OptionError, PROMPTS, {"num_return_sequences": -1}),
        ("needs assistant=", AssistantError, PROMPTS, {"spec_strategy": "draft"}),
        ("unknown spec_strategy 'x'", OptionError, PROMPTS, {"spec_strategy": "x"}),
        ("stop_strings", OptionError, PROMPTS, {"stop_strings": "x"}),
        ("not used by the model", ValueError, PROMPTS, {"no_such_option": 1}),
        ("max_length", ValueError, many(30), {"max_length": 20, "max_new_tokens": None}),
    ],
)
def test_refused_before_anything_runs(
    match: str, error: type[Exception], inputs: Any, options: dict[str, Any]
) -> None:
    model = tiny_models.build("llama")
    before = snapshot(model)
    call = {"max_new_tokens": 4, "spec_strategy": "lookup", "do_sample": False, **options}
    for method in (model.generate_batch, model.generate_batch_iter):
        with count_forwards(model) as forwards, pytest.raises(error, match=match):
            method(inputs, **call)
        assert forwards == []
        assert snapshot(model) == before
