"""One benchmark: its contenders, rejected settings, and results."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import AssistantError, LookupConfig, OptionError, TreeConfig, UnsupportedError
from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.contenders import GREEDY
from hf_spec.evaluation.bench.suite import Benchmark, make_contenders
from hf_spec.evaluation.settings import Suite
from hf_spec.methods.entries import Entry, parse_entry
from tests.model_watch import count_forwards
from tests.tiny_models import VOCAB, build, draft_model, padded, save_disco_adapter

TEMPLATE = (
    "{% for m in messages %}{{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}the{% endif %}"
)
LOOKUP, TREE, DRAFT = (
    parse_entry(text) for text in ("lookup", "tree@truncated:2", "draft@truncated:2")
)
SHORT: dict[str, Any] = {"new_tokens": 6, "repeats": 1, "baselines": False}


def names(benchmark: Benchmark) -> list[str]:
    return [contender.name for contender in benchmark.contenders]


def last(benchmark: Benchmark) -> dict[str, Any]:
    *_, results = benchmark.run()
    return json.loads(json.dumps(results.to_dict(command="x")))


class TestRefusals:
    def test_more_rows_than_prompts(
        self, model: Any, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        with pytest.raises(OptionError, match="a batch of 3 rows"):
            Benchmark(model, tokenizer, prompts, [], Suite(batch_sizes=(1, 3)))

    def test_turns_without_a_template(self, model: Any, tokenizer: Any) -> None:
        prompts = [Prompt("x", "t", ("a", "b"))]
        with pytest.raises(UnsupportedError, match="no chat template"):
            Benchmark(model, tokenizer, prompts, [], Suite(multi_turn=True))


class TestResults:
    def test_a_stored_strategy_is_taken_off(
        self, model: Any, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        model = copy.deepcopy(model)
        model.generation_config.spec_strategy = "lookup"
        report = last(Benchmark(model, tokenizer, prompts, [], Suite(**SHORT)))
        assert {record["stats"] for record in report["records"]} == {None}

    def test_knowing_drafters_do(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        suite = Suite(**SHORT, synthetic_acceptance=0.5, synthetic_length=3, oracle="truncated:2")
        benchmark = Benchmark(model, tokenizer, prompts, [], suite)
        assert names(benchmark) == ["plain", "synthetic, 3 tokens, acceptance 0.5", "oracle"]
        report = last(benchmark)
        assert report["synthetic_acceptance"] == 0.5
        assert all(record["identical"] for record in report["records"])

    def test_two_batch_sizes(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        suite = Suite(batch_sizes=(2, 1), new_tokens=6, repeats=2)
        benchmark = Benchmark(model, tokenizer, prompts, [LOOKUP], suite)
        ticks: list[int] = []
        counts = [len(found.records) for found in benchmark.run(lambda: ticks.append(1))]
        single, batched = len(benchmark.contenders), 2
        # Per prompt, then the batch, which the lookups of transformers and economize do not run.
        assert counts == [2 * single, 4 * single, 4 * single + 2 * batched]
        assert len(ticks) == benchmark.num_runs == counts[-1]
        report = last(benchmark)
        assert {r["batch_size"] for r in report["summary"]} == {1, 2}
        assert all(record["identical"] for record in report["records"])
        of_batches = {r["contender"] for r in report["records"] if r["batch_size"] == 2}
        assert of_batches == {"plain", "lookup"}
        assert (report["command"], report["dtype"], report["prompts"]) == ("x", "float32", 2)
        assert report["environment"]["threads"] == 1

    def test_conversations(self, model: Any, tokenizer: Any) -> None:
        tokenizer.chat_template = TEMPLATE
        prompts = [Prompt("x", "t", ("one two three one two", "a b c"))]
        suite = Suite(**SHORT, multi_turn=True)
        benchmark = Benchmark(model, tokenizer, prompts, [LOOKUP], suite)
        first, second = benchmark.prompts
        ids = first.encode(tokenizer)
        output = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(output, skip_special_tokens=True).strip()
        assert second.history == (("one two three one two", answer),)
        report = last(benchmark)
        assert [r["prompt"] for r in report["records"]] == 2 * ["x/1"] + 2 * ["x/2"]
        assert all(record["identical"] for record in report["records"])

    def test_sampling(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        suite = Suite(**SHORT, sample=True, temperature=1.5)
        report = last(Benchmark(model, tokenizer, prompts, [LOOKUP], suite))
        assert {record["identical"] for record in report["records"]} == {None}

    @pytest.mark.parametrize("cut", [{"top_k": 1}, {"top_p": 1e-6}])
    def test_cuts_of_sampling_reach_every_contender(
        self, model: Any, prompts: list[Prompt], tokenizer: Any, cut: dict[str, Any]
    ) -> None:
        suite = Suite(**SHORT, sample=True, temperature=5.0, **cut)
        ids = prompts[0].encode(tokenizer)
        greedy = model.generate(ids, max_new_tokens=6, do_sample=False)
        for contender in Benchmark(model, tokenizer, prompts, [LOOKUP], suite).contenders:
            # Only one token is left to sample from, at any temperature.
            assert torch.equal(contender.run(ids, 6).sequences, greedy)

    def test_profile_and_step_cost(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        suite = Suite(**SHORT, profile=True, step_cost=True)
        report = last(Benchmark(model, tokenizer, prompts, [LOOKUP], suite))
        (profile,) = report["profiles"]
        assert (profile["batch_size"], profile["contender"]) == (1, "lookup")
        assert profile["seconds"]["verify: forward"] > 0
        assert len(report["step_cost"]["auto"]["64"]) == 1


def names_of(model: Any, entries: Any, suite: Suite) -> list[str]:
    return [contender.name for contender in make_contenders(model, entries, suite, GREEDY)]


class TestContenders:
    def test_others_take_part(self, model: Any) -> None:
        economize = ["economize lookup"] if importlib.util.find_spec("economize") else []
        ours = ["lookup", "tree@truncated:2", "draft@truncated:2"]
        # Both of our strategies have the same draft model, so it is measured once.
        others = ["transformers lookup", "transformers assistant", *economize]
        assert names_of(model, [LOOKUP, TREE, DRAFT], Suite()) == ["plain", *others, *ours]

    def test_two_draft_models_are_two_baselines(self, model: Any) -> None:
        entries = [TREE, parse_entry("gsd@truncated:1")]
        found = names_of(model, entries, Suite())
        assert [n for n in found if n.startswith("transformers assistant")] == [
            "transformers assistant",
            "transformers assistant 2",
        ]

    def test_transformers_takes_drafts_of_its_own_width_alone(self, model: Any) -> None:
        entries = [Entry("padded", TreeConfig(), padded(draft_model("llama"), VOCAB + 3))]
        assert names_of(model, entries, Suite())[-1] == "padded"
        assert "transformers assistant" not in names_of(model, entries, Suite())

    def test_economize_cannot_sample(self, model: Any) -> None:
        assert names_of(model, [], Suite(sample=True)) == ["plain", "transformers lookup"]


class TestRefusedContenders:
    @pytest.mark.parametrize("knowing", [{"synthetic_acceptance": 0.5}, {"oracle": "x"}])
    def test_sampling_with_known_answers(self, knowing: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match="choose greedy"):
            Suite(sample=True, **knowing)

    def test_the_same_entry_twice(self, model: Any) -> None:
        with pytest.raises(OptionError, match="--strategy a is given 2 times"):
            names_of(model, [Entry("a", LookupConfig())] * 2, Suite())

    def test_an_adapter_of_another_model(self, tmp_path: Path, model: Any) -> None:
        save_disco_adapter(tmp_path, build("gpt2"))
        entries = [parse_entry(f"disco@{tmp_path}")]
        with count_forwards(model) as calls, pytest.raises(AssistantError):
            names_of(model, entries, Suite())
        assert not calls
