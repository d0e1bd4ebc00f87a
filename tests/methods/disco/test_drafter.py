"""DISCO: a row's draft ends where the classifier decides, on chains, trees and graphs; errors."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import (
    AssistantError,
    DiscoConfig,
    DraftConfig,
    GsdConfig,
    OptionError,
    TreeConfig,
    UnsupportedError,
)
from hf_spec.adapters.folder import load_adapter
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter
from hf_spec.drafting.length_policy import DraftedToken, LevelCost
from hf_spec.methods.disco import drafter as disco
from hf_spec.methods.disco.classifier import DiscoClassifier, draft_features
from hf_spec.methods.disco.drafter import DiscoPolicy, MeasuredDiscoPolicy
from hf_spec.methods.draft_model import loading
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from tests.methods.draft_model.test_drafter import start
from tests.model_watch import count_forwards
from tests.tiny_models import (
    build,
    disco_adapter,
    draft_model,
    prompts,
    ragged_batch,
    repetitive_prompt,
    save_disco_adapter,
)

PROMPT = repetitive_prompt()


def threshold_between(adapter: str, level: int = 1) -> float:
    """Return a threshold that some rows of `ragged_batch` pass at that level and others do not."""
    scores = sorted(row[-1] for row in row_scores(adapter, level))
    return (scores[1] + scores[2]) / 2


@torch.no_grad()
def row_scores(adapter: str, levels: int) -> list[list[float]]:
    """Return the classifier's scores of the greedy draft tokens, per row of `ragged_batch`."""
    classifier = DiscoClassifier.from_adapter(load_adapter(adapter, "disco"))
    model, found = draft_model("llama"), []
    for ids, mask in zip(*ragged_batch().values(), strict=True):
        sequence, scores = ids[mask.bool()][None], []
        for level in range(levels):
            probs = model(sequence).logits[:, -1].softmax(dim=-1)
            logit = classifier(draft_features(probs, torch.tensor([level])))
            scores.append(logit.sigmoid().item())
            sequence = torch.cat([sequence, probs.argmax(dim=-1)[:, None]], dim=1)
        found.append(scores)
    return found


@torch.no_grad()
def heights(config: Any, inputs: dict[str, Tensor]) -> list[int]:
    state = start(inputs)
    policy = disco.make_policy(config, build("llama"))
    drafter = DraftModelDrafter(config, draft_model("llama"), policy)
    with drafter.active(state):
        tree = drafter.draft(state, state.draft_limits)
    return [tree.height(row) for row in range(state.num_rows)]


class TestDefault:
    """Whose values a call without sizes uses."""

    def drafter(self, **options: Any) -> Any:
        adapter = load_adapter(disco_adapter("llama"), "disco")
        adapter = replace(adapter, options={**adapter.options, **options})
        return disco._make_drafter(DiscoConfig(), build("llama"), adapter)

    def test_those_of_a_calibration(self) -> None:
        values = {"threshold": 0.3, "max_draft_tokens": 7}
        drafter = self.drafter(**values, calibration={"best": "threshold 0.3, longest 7"})
        assert isinstance(drafter, DraftModelDrafter)
        assert isinstance(drafter.policy, DiscoPolicy)
        assert (drafter.policy.threshold, drafter.policy.longest) == (0.3, 7)

    def test_measured_time_without_a_calibration(self) -> None:
        assert isinstance(self.drafter(), AdaptiveLengthDrafter)


class TestDecision:
    @pytest.mark.parametrize("min_draft_tokens", [1, 2, 3])
    def test_each_row_stops_behind_the_first_token_it_distrusts(
        self, min_draft_tokens: int
    ) -> None:
        adapter, cap = disco_adapter("llama"), 6
        threshold = threshold_between(adapter, min_draft_tokens)
        config = DiscoConfig(
            adapter=adapter,
            acceptance_threshold=threshold,
            max_draft_tokens=cap,
            min_draft_tokens=min_draft_tokens,
        )
        expected = []
        for scores in row_scores(adapter, cap):
            # The token that ends a row's draft is still sent.
            stops = [i + 1 for i, s in enumerate(scores) if s < threshold]
            expected.append(next((n for n in stops if n >= min_draft_tokens), cap))
        assert heights(config, ragged_batch()) == expected
        assert len(set(expected)) > 1
        if min_draft_tokens == 1:
            assert 1 in expected, "position 0 decides as well"

    @pytest.mark.parametrize("kind", [DiscoConfig, TreeConfig, GsdConfig])
    @pytest.mark.parametrize(("threshold", "height"), [(0.0, 4), (1.0, 1)])
    def test_limits(self, kind: type[DraftConfig], threshold: float, height: int) -> None:
        options: dict[str, Any] = {} if kind is DiscoConfig else {"max_nodes": 500}
        if kind is GsdConfig:
            options |= {"min_probability": 0.0, "max_draft_nodes": 5000, "merge_length": None}
        config = kind(
            length_policy="disco",
            adapter=disco_adapter("llama"),
            acceptance_threshold=threshold,
            max_draft_tokens=4,
            **options,
        )
        assert heights(config, {"input_ids": PROMPT}) == [height]

    def test_measured_lengths_multiply_the_acceptance_of_all_levels(self) -> None:
        policy = MeasuredDiscoPolicy(DiscoPolicy(9, 0.5, DiscoClassifier()))
        policy.level_cost = lambda level: LevelCost(0.2)
        policy.start(1)
        policy.limit(0)
        token = DraftedToken(0, 5, 0, 0.9, score=0.5)
        # Before any trial, a next level with reach 0.5 gains 0.33, and one with 0.25 gains 0.15.
        assert [policy.goes_on([token]) for _ in range(2)] == [[True], [False]]

    def test_a_tree_asks_about_the_end_of_its_likeliest_path(self) -> None:
        adapter = disco_adapter("llama")
        threshold = threshold_between(adapter)
        shared = {"adapter": adapter, "acceptance_threshold": threshold, "max_draft_tokens": 2}
        # At the first level, a tree's most probable path is the chain.
        chain = heights(DiscoConfig(**shared), ragged_batch())
        tree = heights(TreeConfig(length_policy="disco", max_nodes=500, **shared), ragged_batch())
        assert tree == chain
        assert set(chain) == {1, 2}

    def test_policy_alone(self) -> None:
        policy = DiscoPolicy(5, 0.6, DiscoClassifier())
        newest = [DraftedToken(r, 1, 0, 0.5, score) for r, score in enumerate((0.59, 0.6, 1.0))]
        assert policy.goes_on(newest) == [False, True, True]
        assert policy.limit(0) == 5
        scores = policy.score(torch.ones(3, 8) / 8, [0, 1, 2])
        assert scores.shape == (3,)
        assert ((scores > 0) & (scores < 1)).all()

    @pytest.mark.parametrize("kind", [DiscoConfig, TreeConfig])
    def test_a_level_is_scored_in_one_pass_for_all_rows(
        self, kind: type[DraftConfig], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        passes: list[int] = []
        score = DiscoPolicy.score

        def watch(self: DiscoPolicy, draft_probs: Tensor, positions: Any) -> Tensor:
            passes.append(len(draft_probs))
            return score(self, draft_probs, positions)

        monkeypatch.setattr(DiscoPolicy, "score", watch)
        output = build("llama").generate(
            **ragged_batch(),
            max_new_tokens=16,
            do_sample=False,
            spec_strategy=kind(length_policy="disco", adapter=disco_adapter("llama")),
            assistant=draft_model("llama"),
            return_dict_in_generate=True,
        )
        assert len(passes) == output.spec_stats.draft_forwards
        assert passes[0] == 5

    def test_positions_count_from_the_beginning_of_the_generation(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: list[list[int]] = []
        score = DiscoPolicy.score

        def watch(self: DiscoPolicy, draft_probs: Tensor, positions: Any) -> Tensor:
            seen.append(list(positions))
            return score(self, draft_probs, positions)

        monkeypatch.setattr(DiscoPolicy, "score", watch)
        model = build("llama")
        config = DiscoConfig(
            adapter=disco_adapter("llama"), acceptance_threshold=0.0, max_draft_tokens=2
        )
        model.generate(
            PROMPT,
            max_new_tokens=9,
            do_sample=False,
            spec_strategy=config,
            assistant=copy.deepcopy(model),
        )
        # Everything is accepted: two draft tokens and a bonus token per round.
        assert seen == [[0], [1], [3], [4], [6], [7]]


class TestGenerate:
    def test_values_of_the_adapter_are_the_defaults(self, tmp_path: Path) -> None:
        save_disco_adapter(tmp_path, build("llama"), threshold=0.25, max_draft_tokens=3)
        policy = disco.make_policy(DiscoConfig(adapter=str(tmp_path)), build("llama"))
        assert (policy.threshold, policy.max_draft_tokens) == (0.25, 3)
        given = DiscoConfig(adapter=str(tmp_path), acceptance_threshold=0.0, max_draft_tokens=7)
        policy = disco.make_policy(given, build("llama"))
        assert (policy.threshold, policy.max_draft_tokens) == (0.0, 7)

    def test_the_adapter_names_the_draft_model(self, tmp_path: Path) -> None:
        model = build("llama")
        copy.deepcopy(draft_model("llama")).save_pretrained(tmp_path / "small")
        drafted = []
        for name, draft in (("a", {"truncated": 2}), ("b", "../small"), ("c", "small")):
            folder = tmp_path / name
            save_disco_adapter(folder, model, draft=draft)
            if draft == "small":
                copy.deepcopy(draft_model("llama")).save_pretrained(folder / "small")
            output = self.generate(spec_strategy="disco", assistant=str(folder))
            drafted.append(output.spec_stats.drafted_by_position)
        config = DiscoConfig(adapter=str(tmp_path / "a"))
        output = self.generate(spec_strategy=config, assistant=draft_model("llama"))
        drafted.append(output.spec_stats.drafted_by_position)
        assert drafted[0] == drafted[1] == drafted[2] == drafted[3] != []

    @pytest.mark.parametrize("given", ["assistant", "option"])
    def test_the_adapter_is_read_once_a_call(
        self, given: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        adapter, read, resolved = disco_adapter("llama"), [], []

        def watch_read(*args: Any) -> Any:
            read.append(args)
            return load_adapter(*args)

        def watch_resolve(*args: Any) -> Any:
            resolved.append(args)
            return resolve_draft_model(*args)

        monkeypatch.setattr(disco, "load_adapter", watch_read)
        for module in (disco, loading):
            monkeypatch.setattr(module, "resolve_draft_model", watch_resolve)
        for calls in (1, 2):
            if given == "assistant":
                self.generate(spec_strategy="disco", assistant=adapter)
            else:
                config = DiscoConfig(adapter=adapter)
                self.generate(spec_strategy=config, assistant=draft_model("llama"))
            assert len(read) == len(resolved) == calls

    def test_a_truncated_draft_is_checked_like_any_other(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(model: object) -> None:
            raise UnsupportedError("no")

        monkeypatch.setattr(loading, "check_model", refuse)
        with pytest.raises(AssistantError, match="the assistant cannot draft: no"):
            disco.find_draft_model(load_adapter(disco_adapter("llama")), build("llama"))

    def test_a_truncated_draft_is_built_once(self) -> None:
        adapter, model = load_adapter(disco_adapter("llama")), build("llama")
        assert disco.find_draft_model(adapter, model) is disco.find_draft_model(adapter, model)

    @pytest.mark.parametrize(
        ("name", "inputs", "kind"),
        [
            ("llama", "one", GsdConfig),
            ("llama", "ragged", TreeConfig),
            ("bloom", "ragged", GsdConfig),
            ("gemma3", "one", TreeConfig),
        ],
    )
    def test_trees_and_graphs_are_exact(self, name: str, inputs: str, kind: Any) -> None:
        model = build(name)
        options = {**prompts(name, inputs), "max_new_tokens": 16, "do_sample": False}
        config = kind(length_policy="disco", adapter=disco_adapter(name))
        output = model.generate(
            **options,
            spec_strategy=config,
            assistant=draft_model(name),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, model.generate(**options))
        assert output.spec_stats.accepted_tokens > 0

    @pytest.mark.full
    def test_draft_keys_and_values_are_cut_back_at_every_length(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        seen: set[tuple[int, int]] = set()
        lengths: list[int] = []
        draft, observe = DraftModelDrafter.draft, DraftModelDrafter.observe

        def remember(self: DraftModelDrafter, state: Any, limits: Any) -> Any:
            lengths[:] = [len(tokens) for tokens in state.tokens]
            return draft(self, state, limits)

        def watch(self: DraftModelDrafter, verdict: Any, output: Any) -> None:
            observe(self, verdict, output)
            assert self._runner is not None
            for row, path in enumerate(verdict.paths):
                if height := verdict.tree.height(row):
                    # The last drafted token has not run, so it has no keys and values.
                    kept = min(len(path), height - 1)
                    assert self._runner.rows.stored[row] == lengths[row] + kept
                    seen.add((height, len(path)))

        monkeypatch.setattr(DraftModelDrafter, "draft", remember)
        monkeypatch.setattr(DraftModelDrafter, "observe", watch)
        model, adapter = build("llama"), disco_adapter("llama")
        for cap in (1, 2, 3, 4):
            config = DiscoConfig(adapter=adapter, acceptance_threshold=0.41, max_draft_tokens=cap)
            for seed in range(4):
                options = {**ragged_batch(seed=seed), "max_new_tokens": 24, "do_sample": False}
                got = model.generate(
                    **options, spec_strategy=config, assistant=draft_model("llama")
                )
                assert torch.equal(got, model.generate(**options))
        assert {(h, accepted) for h in range(1, 4) for accepted in range(h + 1)} <= seen

    def generate(self, **options: Any) -> Any:
        return build("llama").generate(
            PROMPT, max_new_tokens=20, do_sample=False, return_dict_in_generate=True, **options
        )


class TestRefusals:
    def generate(self, model: Any = None, **options: Any) -> None:
        model = build("llama") if model is None else model
        with count_forwards(model) as calls:
            try:
                model.generate(PROMPT, max_new_tokens=4, **options)
            finally:
                assert calls == [], "refused before the first forward"

    @pytest.mark.parametrize("kind", [DraftConfig, TreeConfig, GsdConfig])
    def test_the_policy_without_an_adapter(self, kind: type[DraftConfig]) -> None:
        with pytest.raises(OptionError, match=r"needs a trained classifier: adapter="):
            self.generate(spec_strategy=kind(length_policy="disco"), assistant=draft_model("llama"))

    def test_an_adapter_without_the_policy(self) -> None:
        with pytest.raises(OptionError, match="adapter='x' is not used by length_policy=None"):
            DraftConfig(adapter="x")

    def test_a_draft_model_without_an_adapter(self) -> None:
        with pytest.raises(AssistantError, match=r"lacks the classifier: .*DiscoConfig\(adapter="):
            self.generate(spec_strategy="disco", assistant=draft_model("llama"))

    def test_a_folder_that_is_no_adapter(self, tmp_path: Path) -> None:
        with pytest.raises(AssistantError, match=r"adapter_config\.json"):
            self.generate(spec_strategy="disco", assistant=str(tmp_path))

    def test_an_adapter_of_another_method(self, tmp_path: Path) -> None:
        save_disco_adapter(tmp_path, build("llama"))
        file = tmp_path / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "method": "falcon"}))
        with pytest.raises(AssistantError, match="'falcon', not 'disco'"):
            self.generate(spec_strategy="disco", assistant=str(tmp_path))

    def test_another_target(self) -> None:
        other = "qwen2"
        config = DiscoConfig(adapter=disco_adapter("llama"))
        with pytest.raises(AssistantError, match="trained for"):
            self.generate(build(other), spec_strategy=config, assistant=draft_model(other))

    def test_another_target_of_the_same_sizes(self) -> None:
        with pytest.raises(AssistantError, match="same sizes but other weights"):
            self.generate(
                build("llama", seed=5), spec_strategy="disco", assistant=disco_adapter("llama")
            )

    @pytest.mark.parametrize(
        ("draft", "message"),
        [
            (None, r"names no draft model .*DiscoConfig\(adapter="),
            ({"truncated": 9}, "truncated=9"),
            ("no model!", "'no model!' cannot be loaded"),
        ],
    )
    def test_adapters_whose_draft_model_cannot_be_had(
        self, draft: Any, message: str, tmp_path: Path
    ) -> None:
        save_disco_adapter(tmp_path, build("llama"), draft=draft)
        with pytest.raises((AssistantError, OptionError), match=message):
            self.generate(spec_strategy="disco", assistant=str(tmp_path))

    @pytest.mark.parametrize("lacking", ["threshold", "max_draft_tokens"])
    def test_an_adapter_without_its_values(self, lacking: str, tmp_path: Path) -> None:
        save_disco_adapter(tmp_path, build("llama"), **{lacking: None})
        with pytest.raises(AssistantError, match=f"{lacking}=None; calibrate it"):
            self.generate(spec_strategy="disco", assistant=str(tmp_path))

    @pytest.mark.parametrize(
        "options",
        [
            {"acceptance_threshold": 1.5},
            {"acceptance_threshold": "high"},
            {"max_draft_tokens": 0},
            {"max_draft_tokens": 2.5},
            {"min_draft_tokens": 0},
            {"adapter": 3},
            {"length_policy": "static", "max_draft_tokens": 3},
        ],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(options))):
            DiscoConfig(**options)

    def test_the_adapters_length_is_for_this_policy_alone(self) -> None:
        config = DraftConfig(length_policy="disco", adapter="x")
        assert config.resolve(measures=True).max_draft_tokens is None
        assert DraftConfig(length_policy="confidence").resolve(measures=True).max_draft_tokens == 5
