"""SDSAT end to end: exact output, and the number of forward passes of both loops."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

import hf_spec
from hf_spec import SdsatConfig
from hf_spec.adapters.folder import save_adapter
from hf_spec.drafting.lossy_rules import PathSampling
from hf_spec.drafting.rank_tree import published_trees
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.sdsat.adaptive_tokens import from_adapter
from hf_spec.methods.sdsat.drafter import SdsatDrafter
from tests.model_watch import count_forwards, snapshot
from tests.tiny_models import (
    VOCAB,
    build,
    prompts,
    random_adaptive_tokens,
    repetitive_prompt,
    sdsat_adapter,
    tokenizer,
)

# Every token is a draft for the first position, so at least one draft is always accepted.
SURE: list[tuple[int, ...]] = [*((rank,) for rank in range(VOCAB)), *((r, 0) for r in range(VOCAB))]
TREES = list(published_trees("sdsat"))
BOTH = pytest.mark.parametrize("fused", [False, True], ids=["published", "fused"])


def generate(name: str, kind: str = "one", **options: Any) -> Any:
    return build(name).generate(
        **prompts(name, kind),
        **{"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True, **options},
    )


class TestGreedyIsIdentical:
    @pytest.mark.by_default(name=("llama",), k=(1, 5, 13))
    @BOTH
    @pytest.mark.parametrize(("name", "k"), [("llama", 1), ("bloom", 5), ("gemma3", 13)])
    def test_chains(self, name: str, k: int, fused: bool) -> None:
        for kind in ("one", "ragged"):
            config = SdsatConfig(num_adaptive=k, fused=fused)
            output = generate(name, kind, spec_strategy=config, assistant=sdsat_adapter(name))
            assert torch.equal(output.sequences, generate(name, kind).sequences)
            assert output.spec_stats.drafted_tokens > 0

    @pytest.mark.full
    @BOTH
    @pytest.mark.parametrize("tree", [TREES[0], TREES[-1], SURE], ids=[TREES[0], TREES[-1], "sure"])
    def test_trees(self, tree: Any, fused: bool) -> None:
        accepted = 0
        for name in ("llama", "gemma"):
            config = SdsatConfig(tree=tree, fused=fused, max_adaptive_nodes=20 if fused else None)
            options = {"spec_strategy": config, "assistant": sdsat_adapter(name)}
            output = generate(name, "ragged", **options)
            assert torch.equal(output.sequences, generate(name, "ragged").sequences)
            accepted += output.spec_stats.accepted_tokens
        assert accepted > 0

    @BOTH
    @pytest.mark.parametrize("options", [{"max_adaptive_nodes": 1}, {"min_probability": 0.1}])
    def test_with_few_nodes(self, options: dict[str, Any], fused: bool) -> None:
        config = SdsatConfig(num_adaptive=4, fused=fused, **options)
        output = generate("gemma", "ragged", spec_strategy=config, assistant=sdsat_adapter("gemma"))
        assert torch.equal(output.sequences, generate("gemma", "ragged").sequences)

    @BOTH
    @pytest.mark.parametrize("mode", ["gated", "embeddings"])
    @pytest.mark.parametrize("diverse", [False, True], ids=["identical", "diverse"])
    def test_every_kind_of_adapter(self, mode: str, diverse: bool, fused: bool) -> None:
        adapter = random_adaptive_tokens(build("llama"), mode, diverse)
        options = {"spec_strategy": SdsatConfig(num_adaptive=5, fused=fused), "assistant": adapter}
        output = generate("llama", **options, output_logits=True)
        plain = generate("llama", output_logits=True)
        assert torch.equal(output.sequences, plain.sequences)
        for mine, theirs in zip(output.logits, plain.logits, strict=True):
            torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=1e-4)

    @BOTH
    def test_processors_and_stop_rules(self, fused: bool) -> None:
        said = generate("llama").sequences[0, -24:].tolist()
        for options in (
            {"repetition_penalty": 1.3},
            {"no_repeat_ngram_size": 2},
            {"eos_token_id": said[7]},
            {"eos_token_id": said[8], "min_new_tokens": 12},
            {"stop_strings": [tokenizer().decode(said[4:7])[1:-1]], "tokenizer": tokenizer()},
            {"max_new_tokens": 1},
            {"max_new_tokens": 2},
            {"max_new_tokens": 3},
        ):
            output = generate(
                "llama",
                spec_strategy=SdsatConfig(tree=SURE, fused=fused, max_adaptive_nodes=9),
                assistant=sdsat_adapter("llama"),
                **options,
            )
            assert torch.equal(output.sequences, generate("llama", **options).sequences)


class TestTheLoops:
    def test_the_published_one_takes_two_forwards_of_the_target(self) -> None:
        model = build("llama")
        config = SdsatConfig(tree=SURE)
        prompts("llama", "one")  # Cached; building it runs forward passes.
        with count_forwards(model) as calls:
            stats = generate(
                "llama", spec_strategy=config, assistant=sdsat_adapter("llama")
            ).spec_stats
        assert stats.target_forwards == len(calls)
        assert stats.draft_forwards == 0
        counters = stats.counters
        assert counters["fused_rounds"] == 0
        assert counters["adaptive_rounds"] == counters["verify_rounds"] > 1
        # Each second forward pass accepts 1 or 2 draft tokens; every pass adds a token of its own.
        assert counters["verify_rounds"] <= stats.accepted_tokens <= 2 * counters["verify_rounds"]
        assert stats.accepted_tokens + stats.target_forwards == 24
        assert stats.tau == stats.accepted_tokens / stats.target_forwards
        assert stats.drafted_by_position[0] == counters["verify_rounds"]
        # Two adaptive tokens per round, fewer near the maximum length.
        assert counters["adaptive_nodes"] <= 2 * counters["adaptive_rounds"]

    def test_the_fused_one_takes_one(self) -> None:
        model = build("llama")
        config = SdsatConfig(tree=SURE, fused=True)
        prompts("llama", "one")  # Cached; building it runs forward passes.
        with count_forwards(model) as calls:
            stats = generate(
                "llama", spec_strategy=config, assistant=sdsat_adapter("llama")
            ).spec_stats
        assert stats.target_forwards == len(calls)
        assert stats.counters["adaptive_rounds"] == 1
        rounds = stats.counters["fused_rounds"] + stats.counters["verify_rounds"]
        assert stats.accepted_tokens + stats.target_forwards == 24
        # All but the first pass, and the last one if there is room for only one token.
        assert rounds >= stats.target_forwards - 2
        assert rounds <= stats.accepted_tokens

    def test_drafts_are_what_the_target_says_behind_adaptive_tokens(self) -> None:
        """Both loops draft the tokens that plain forward passes predict after the same text."""
        model = build("llama")
        adapter = random_adaptive_tokens(model, "embeddings", diverse=True)
        vectors = adapter.tensors["embeddings"].float()
        text = repetitive_prompt()[0].tolist()
        for fused in (False, True):
            drafter, state = drafting(adapter, SdsatConfig(num_adaptive=4, fused=fused), text)
            with drafter.active(state), torch.no_grad():
                first = drafter.draft(state, state.draft_limits)
                assert first.tokens == [text[-1], -1, -2, -3, -4]
                embeddings = torch.cat([model.get_input_embeddings()(torch.tensor(text)), vectors])
                logits = model(inputs_embeds=embeddings[None, : len(text) + 4]).logits[0]
                predicted = logits[len(text) - 1 :]
                verdict = NodeDraw([], 1).verify(first, predicted, state)
                state.commit(verdict)
                drafter.observe(verdict, ForwardOutput(predicted))
                second = drafter.draft(state, state.draft_limits)
            certain, *drafts = predicted.argmax(dim=-1).tolist()
            assert second.tokens[:5] == [certain, *drafts]
            assert second.parent[:5] == [-1, 0, 1, 2, 3]
            assert len(second.tokens) == (25 if fused else 5)

    def test_no_draft_below_an_end_of_sequence(self) -> None:
        text = repetitive_prompt()[0].tolist()
        config = SdsatConfig(num_adaptive=3, fused=True)
        drafter, state = drafting(sdsat_adapter("llama"), config, text, eos=30)
        predicted = torch.zeros(4, VOCAB)
        predicted[[0, 1, 2, 3], [20, 21, 30, 22]] = 9.0
        with drafter.active(state):
            first = drafter.draft(state, state.draft_limits)
            verdict = NodeDraw([], 1).verify(first, predicted, state)
            state.commit(verdict)
            drafter.observe(verdict, ForwardOutput(predicted))
            second = drafter.draft(state, state.draft_limits)
        assert second.tokens[:3] == [20, 21, 30]
        # Only the two other nodes have chains.
        assert second.tokens[3:] == [-1] * 6

    @pytest.mark.parametrize(("room", "adaptive"), [(1, 0), (2, 0), (3, 1), (4, 2), (9, 3)])
    def test_no_more_adaptive_tokens_than_there_is_room_for(self, room: int, adaptive: int) -> None:
        for fused in (False, True):
            config = SdsatConfig(num_adaptive=3, fused=fused)
            drafter, state = drafting(
                sdsat_adapter("llama"), config, repetitive_prompt()[0].tolist(), room
            )
            with drafter.active(state):
                assert drafter.draft(state, state.draft_limits).num_nodes == 1 + adaptive

    def test_a_budget_keeps_the_likeliest_chains(self) -> None:
        config = SdsatConfig(num_adaptive=2, fused=True, max_adaptive_nodes=3)
        drafter, state = drafting(sdsat_adapter("llama"), config, repetitive_prompt()[0].tolist())
        # The first draft token is nearly certain, the second is not: verification ends in between.
        predicted = torch.zeros(3, VOCAB)
        predicted[0, 10] = predicted[1, 11] = 20.0
        predicted[2, 12] = 0.5
        with drafter.active(state):
            first = drafter.draft(state, state.draft_limits)
            verdict = NodeDraw([], 1).verify(first, predicted, state)
            state.commit(verdict)
            drafter.observe(verdict, ForwardOutput(predicted))
            second = drafter.draft(state, state.draft_limits)
        assert second.tokens == [10, 11, 12, -1, -1, -1]
        assert second.parent == [-1, 0, 1, 1, 3, 2]

    def test_where_the_walk_ends_without_a_chain_the_next_tree_is_one(self) -> None:
        config = SdsatConfig(num_adaptive=3, fused=True, max_adaptive_nodes=1)
        stats = generate("gemma", spec_strategy=config, assistant=sdsat_adapter("gemma")).spec_stats
        assert stats.counters["adaptive_rounds"] > 1
        assert stats.counters["adaptive_nodes"] <= stats.target_forwards


def drafting(
    adapter: Any, config: SdsatConfig, text: list[int], room: int = 50, eos: int | None = None
) -> tuple[SdsatDrafter, GenerationState]:
    drafter = SdsatDrafter(config, from_adapter(build("llama"), adapter))
    criteria: list[Any] = [MaxLengthCriteria(len(text) + room)]
    if eos is not None:
        criteria.append(EosTokenCriteria(eos))
    prompt = torch.tensor([text])
    state = GenerationState.create(prompt, torch.ones_like(prompt), StopRules(criteria, 1))
    return drafter, state


class TestTheModelIsLeftAsItWas:
    def test_a_second_generation_while_the_first_one_waits(self) -> None:
        """Hooks of one generation do not act in the other, with or without SDSAT."""
        model = copy.deepcopy(build("llama"))
        expected = model.generate(repetitive_prompt(), max_new_tokens=8, do_sample=False)
        before = snapshot(model)
        inner: list[Tensor] = []

        def meanwhile(input_ids: Tensor, scores: Tensor) -> Tensor:
            for options in ({}, {"spec_strategy": "sdsat", "assistant": sdsat_adapter("llama")}):
                prompt = repetitive_prompt()
                inner.append(model.generate(prompt, max_new_tokens=8, do_sample=False, **options))
            return scores

        outer = model.generate(
            repetitive_prompt(),
            max_new_tokens=8,
            do_sample=False,
            spec_strategy="sdsat",
            assistant=sdsat_adapter("llama"),
            logits_processor=[meanwhile],
        )
        assert len(inner) > 2
        assert all(torch.equal(found, expected) for found in [outer, *inner])
        assert snapshot(model) == before

    def test_after_a_stream_that_nobody_reads_to_its_end(self) -> None:
        model = copy.deepcopy(build("llama"))
        before = snapshot(model)
        streamer = TextIteratorStreamer(tokenizer())
        options: dict[str, Any] = {
            "spec_strategy": "sdsat",
            "assistant": sdsat_adapter("llama"),
            "max_new_tokens": 12,
            "streamer": streamer,
        }
        thread = threading.Thread(target=model.generate, args=[repetitive_prompt()], kwargs=options)
        thread.start()
        next(iter(streamer))
        thread.join()
        assert snapshot(model) == before


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"num_adaptive": 0},
            {"num_adaptive": 2.0},
            {"fused": 1},
            {"lossy": "yes"},
            {"tree": "sdsat-6"},
            {"tree": []},
            {"tree": [[0, 0]]},
            {"min_probability": 2},
            {"max_adaptive_nodes": 0},
            {"num_adaptive": 4, "tree": "sdsat-5"},
        ],
    )
    def test_what_cannot_be_used_is_refused(self, options: dict[str, Any]) -> None:
        with pytest.raises(hf_spec.OptionError, match=next(iter(options))):
            SdsatConfig(**options)

    def test_its_published_trees(self) -> None:
        for tree in TREES:
            shape = SdsatConfig(tree=tree).rank_tree
            assert shape is not None
            assert tree == f"sdsat-{shape.height}"
        with pytest.raises(hf_spec.OptionError, match=r"known: sdsat-5, .*sdsat-13, or"):
            SdsatConfig(tree="falcon-llama")

    def test_how_many_adaptive_tokens(self) -> None:
        tokens = from_adapter(build("llama"), sdsat_adapter("llama"))
        for config, usual, length in (
            (SdsatConfig(), 3, 3),
            (SdsatConfig(), None, 5),
            (SdsatConfig(num_adaptive=9), 3, 9),
            (SdsatConfig(tree="sdsat-7"), 3, 7),
        ):
            assert SdsatDrafter(config, tokens, usual).length == length

    def test_diverse_tokens_bound_the_chain(self) -> None:
        adapter = random_adaptive_tokens(build("llama"), diverse=True, window=4)
        for config in (SdsatConfig(num_adaptive=5), SdsatConfig(tree="sdsat-5")):
            with pytest.raises(hf_spec.OptionError, match=r"num_adaptive=5.*at most 4"):
                generate("llama", spec_strategy=config, assistant=adapter)

    def test_nothing_to_draft_with(self) -> None:
        with pytest.raises(hf_spec.AssistantError, match="config has 'sdsat'"):
            generate("llama", spec_strategy="sdsat")
        with pytest.raises(
            hf_spec.AssistantError, match="LlamaForCausalLM is not an SDSAT adapter"
        ):
            generate("llama", spec_strategy="sdsat", assistant=build("llama"))

    def test_a_folder_is_read_again_when_it_changes(self, tmp_path: Path) -> None:
        model: PreTrainedModel = build("llama")
        heard = []
        for window in (2, 4):
            adapter = random_adaptive_tokens(model, "embeddings", diverse=True, window=window)
            adapter.options["num_adaptive"] = window
            save_adapter(tmp_path, adapter)
            stats = generate(
                "llama", spec_strategy="sdsat", assistant=tmp_path, max_new_tokens=6
            ).spec_stats
            heard.append(stats.counters["adaptive_nodes"] / stats.counters["adaptive_rounds"])
        assert heard[1] > heard[0]


class TestPathSampling:
    """The published acceptance rule, if it is configured."""

    def test_it_is_taken_only_when_it_was_asked_for_and_the_target_samples(self) -> None:
        for lossy in (False, True):
            for do_sample in (False, True):
                config = SdsatConfig(lossy=lossy)
                drafter, state = drafting(sdsat_adapter("llama"), config, [3, 4, 5])
                state.do_sample = do_sample
                with drafter.active(state):
                    rule = type(drafter.make_verifier([], 1))
                assert rule is (PathSampling if lossy and do_sample else NodeDraw)

    @BOTH
    def test_greedy_stays_identical(self, fused: bool) -> None:
        config = SdsatConfig(tree="sdsat-5", lossy=True, fused=fused)
        output = generate("gemma", spec_strategy=config, assistant=sdsat_adapter("gemma"))
        assert torch.equal(output.sequences, generate("gemma").sequences)

    @BOTH
    def test_it_generates(self, fused: bool) -> None:
        config = SdsatConfig(tree="sdsat-5", lossy=True, fused=fused)
        stats = generate(
            "gemma",
            "ragged",
            do_sample=True,
            temperature=0.5,
            repetition_penalty=1.2,
            spec_strategy=config,
            assistant=sdsat_adapter("gemma"),
        ).spec_stats
        assert stats.accepted_tokens > 0
