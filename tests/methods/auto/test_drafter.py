"""`auto`: exact output, decisions based on timings, and rounds in which a drafter is idle."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_spec
from hf_spec import AssistantError, AutoConfig, OptionError
from hf_spec.adapters.folder import BaseModel, SpecAdapter, save_adapter
from hf_spec.drafting.cost_model.cost_model_drafter import CostModelDrafter
from hf_spec.drafting.cost_model.draft_source import DraftSource
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from tests.falcon_reference import random_head
from tests.methods.falcon.test_drafter import knowing_head
from tests.model_watch import snapshot
from tests.refusals import refuse
from tests.tiny_models import (
    build,
    disco_adapter,
    draft_model,
    prompts,
    ragged_batch,
    sdsat_adapter,
    settled_prompt,
)

NEW_TOKENS = 20
LEVELS = [[1, 0.02], [5, 0.1]]
NAMES = ("tree", "falcon", "disco", "tree-2")
# Verifying nodes is cheap, and drafting costs little.
CHEAP = {"verify": [[1, 1.0], [50, 1.5]], "draft": dict.fromkeys(NAMES, LEVELS)}
# Verifying a second node costs more than a forward pass.
DEAR = {"verify": [[1, 1.0], [2, 2.1]], "draft": dict.fromkeys(NAMES, LEVELS)}


@cache
def assistants(name: str) -> Any:
    """Return the assistant or assistants of a case."""
    return {
        "tree": lambda: draft_model("llama"),
        "falcon": lambda: random_head("llama"),
        "disco": lambda: disco_adapter("llama"),
        "sdsat": lambda: sdsat_adapter("llama"),
        "two trees": lambda: [draft_model("llama"), draft_model("llama", 1)],
        "all": lambda: [
            draft_model("llama"),
            random_head("llama"),
            disco_adapter("llama"),
            sdsat_adapter("llama"),
        ],
    }[name]()


@cache
def plain(kind: str) -> Tensor:
    return build("llama").generate(
        **prompts("llama", kind), max_new_tokens=NEW_TOKENS, do_sample=False
    )


def run(kind: str = "one", timings: Any = CHEAP, assistant: Any = None, **options: Any) -> Any:
    return build("llama").generate(
        **prompts("llama", kind),
        max_new_tokens=NEW_TOKENS,
        return_dict_in_generate=True,
        spec_strategy=AutoConfig(timings=timings),
        assistant=assistant,
        **{"do_sample": False, **options},
    )


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> list[DraftTree]:
    """Record every tree that is sent to the target."""
    sent: list[DraftTree] = []
    draft = CostModelDrafter.draft

    def watch(self: CostModelDrafter, state: Any, limits: Any) -> DraftTree:
        sent.append(draft(self, state, limits))
        return sent[-1]

    monkeypatch.setattr(CostModelDrafter, "draft", watch)
    return sent


class TestOutput:
    @pytest.mark.parametrize("kind", ["one", "ragged"])
    @pytest.mark.parametrize("name", ["two trees", "all"])
    def test_it_is_the_targets_own(self, name: str, kind: str) -> None:
        """Single assistants are tested in tests/methods/test_contract.py."""
        output = run(kind, assistant=assistants(name))
        assert output.sequences.tolist() == plain(kind).tolist()
        counters = output.spec_stats.counters
        assert sum(count for key, count in counters.items() if key.startswith("asked_")) > 0
        assert output.spec_stats.accepted_tokens > 0

    @pytest.mark.parametrize("name", ["falcon", "sdsat"])
    def test_with_timings_of_this_machine(self, name: str) -> None:
        output = run("ragged", timings=None, assistant=assistants(name))
        assert output.sequences.tolist() == plain("ragged").tolist()

    def test_measuring_leaves_everything_as_it_was(self) -> None:
        model = build("olmo2")
        before, outputs = snapshot(model), []
        for _ in range(2):
            torch.manual_seed(3)
            output = model.generate(
                settled_prompt("olmo2"), max_new_tokens=8, do_sample=True, spec_strategy="auto"
            )
            outputs.append(output.tolist())
        assert outputs[0] == outputs[1]
        assert snapshot(model) == before

    def test_sampled_tokens_do_not_depend_on_what_was_drafted(self) -> None:
        """`NodeDraw` draws once per token for any tree; a single row has no other random draws."""
        # Without DISCO: its classifier draws random initial weights in every call.
        given, said = [assistants(name) for name in ("tree", "falcon", "sdsat")], []
        for timings, assistant in ((DEAR, None), (CHEAP, given)):
            torch.manual_seed(11)
            said.append(run(timings=timings, assistant=assistant, do_sample=True))
        assert said[0].sequences.tolist() == said[1].sequences.tolist()
        assert said[1].spec_stats.drafted_tokens > 0


class TestChoices:
    def test_the_same_timings_give_the_same_trees(self, trees: list[DraftTree]) -> None:
        lengths = []
        for _ in range(2):
            del trees[:]
            run("ragged", assistant=assistants("all"))
            lengths.append([tree.tokens for tree in trees])
        assert lengths[0] == lengths[1]

    def test_nothing_is_drafted_where_nothing_pays(self, trees: list[DraftTree]) -> None:
        output = run("ragged", DEAR, assistants("all"))
        assert all(len(tree.nodes(r)) <= 1 for tree in trees for r in range(tree.num_rows))
        assert output.spec_stats.drafted_tokens == output.spec_stats.draft_forwards == 0
        counters = output.spec_stats.counters
        assert counters["idle_rounds"] == counters["rounds"] == 5 * NEW_TOKENS

    def test_rows_get_drafts_of_their_own(self, trees: list[DraftTree]) -> None:
        run("ragged", assistant=assistants("tree"))
        heights = [[tree.height(row) for row in range(5)] for tree in trees]
        assert any(len({h for h in some if h}) > 1 for some in heights)

    def test_a_drafter_that_is_never_right_is_left_alone(self) -> None:
        wrong = hf_spec.truncated_draft(build("llama", seed=5), 1)
        options: dict[str, Any] = {"input_ids": settled_prompt("llama"), "do_sample": False}
        timings = {**CHEAP, "draft": {"tree": [[1, 0.2], [5, 1.0]]}}
        output = build("llama").generate(
            **options,
            max_new_tokens=60,
            return_dict_in_generate=True,
            spec_strategy=AutoConfig(timings=timings),
            assistant=wrong,
        )
        counters = output.spec_stats.counters
        assert 1 <= counters["asked_tree"] <= 0.4 * counters["rounds"]

    def test_two_drafters_of_one_kind_have_names_and_costs_of_their_own(self) -> None:
        timings = {**CHEAP, "draft": {"tree": [[1, 9.0]], "tree-2": LEVELS}}
        counters = run(timings=timings, assistant=assistants("two trees")).spec_stats.counters
        assert counters["asked_tree"] == 0 < counters["asked_tree-2"]

    @pytest.mark.parametrize("most", [1, 3])
    def test_limits(self, most: int, trees: list[DraftTree]) -> None:
        model, prompt = build("llama"), prompts("llama", "ragged")
        config = AutoConfig(max_draft_tokens=most, max_nodes=2, timings=CHEAP)
        model.generate(
            **prompt,
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            spec_strategy=config,
            assistant=draft_model("llama"),
        )
        for tree in trees:
            assert max(tree.height(row) for row in range(5)) <= min(most, 2)
            assert max(tree.num_drafted(row) for row in range(5)) <= 2

    def test_it_is_better_than_either(self) -> None:
        """With a trained head and repetitive text, it needs no more passes than either strategy."""
        head, prompt = knowing_head(1), ragged_batch((12, 9, 11))
        forwards = {}
        for name, method in {
            "lookup": {"spec_strategy": "lookup"},
            "falcon": {"spec_strategy": "falcon", "assistant": head},
            "auto": {"spec_strategy": AutoConfig(timings=CHEAP), "assistant": head},
        }.items():
            output = build("llama").generate(
                **prompt,
                max_new_tokens=60,
                do_sample=False,
                return_dict_in_generate=True,
                **method,
            )
            forwards[name] = output.spec_stats.target_forwards
        assert forwards["auto"] <= min(forwards.values())


class TestSilence:
    """Rounds in which a drafter does not run."""

    @pytest.mark.parametrize("name", ["tree", "falcon", "disco"])
    def test_afterwards_it_drafts_as_if_it_had_run_in_every_round(
        self, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A drafter that runs every third round drafts the same as one that runs in every round."""
        proposals: dict[tuple[str, int], tuple[list[int], list[int], list[float]]] = {}
        draft = DraftSource.draft

        def silent(self: DraftSource, state: Any, limits: Any) -> None:
            turn = len(state.tokens[0])
            if self.name == "lookup":
                draft(self, state, dict.fromkeys(limits, 0))
                return
            speaks = speaking == "always" or turn % 3 == 0
            draft(self, state, dict.fromkeys(limits, 4 if speaks else 0))
            if turn % 3 == 0:
                tree = self.tree
                probs = self.tree.node_probs
                assert probs is not None
                proposals[speaking, turn] = tree.tokens, tree.parent, probs

        monkeypatch.setattr(DraftSource, "draft", silent)
        # No nodes are sent, so both generations produce the same text, token by token.
        for speaking in ("always", "sometimes"):  # noqa: B007 - read above
            # With larger blocks or more layers, results depend slightly on how pairs are grouped.
            given = random_head("llama", 1, 1) if name == "falcon" else assistants(name)
            output = run(timings=DEAR, assistant=given)
            assert output.spec_stats.target_forwards == NEW_TOKENS
        turns = [turn for kind, turn in proposals if kind == "always"]
        assert len(turns) > 4
        assert any(len(proposals["always", turn][0]) > 3 for turn in turns)
        for turn in turns:
            tokens, parents, probs = proposals["sometimes", turn]
            assert (tokens, parents) == proposals["always", turn][:2]
            assert probs == pytest.approx(proposals["always", turn][2], abs=1e-4)

    def test_a_draft_model_does_not_read_a_token_twice(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        runners: set[ModelRunner] = set()
        forward = ModelRunner.forward

        def watch(self: ModelRunner, *arguments: Any, **options: Any) -> Any:
            runners.add(self)
            return forward(self, *arguments, **options)

        monkeypatch.setattr(ModelRunner, "forward", watch)
        run(assistant=draft_model("llama"))
        (own,) = (runner for runner in runners if runner.model is draft_model("llama"))
        text = settled_prompt("llama").shape[1] + NEW_TOKENS
        drafted = 12 * 5 * NEW_TOKENS
        assert text - 8 <= own.tokens_run <= text + drafted


class TestAssistants:
    def made(self, assistant: Any) -> CostModelDrafter:
        drafter = hf_spec.methods.registry.make_drafter(AutoConfig(), build("llama"), assistant)
        assert isinstance(drafter, CostModelDrafter)
        return drafter

    def test_each_kind_is_recognized(self, tmp_path: Path) -> None:
        model = build("llama")
        model.config.name_or_path = ""
        draft = copy.deepcopy(draft_model("llama"))
        draft.save_pretrained(tmp_path / "draft")
        save_adapter(tmp_path / "falcon", random_head("llama").to_adapter({}))
        save_adapter(tmp_path / "sdsat", sdsat_adapter("llama"))
        found = {
            "tree": [draft_model("llama"), str(tmp_path / "draft")],
            "disco": [disco_adapter("llama"), Path(disco_adapter("llama"))],
            "falcon": [random_head("llama"), tmp_path / "falcon"],
            "sdsat": [sdsat_adapter("llama"), str(tmp_path / "sdsat")],
        }
        for name, given in found.items():
            for assistant in given:
                assert [source.name for source in self.made(assistant).assistants] == [name]

    def test_lookup_is_always_available(self) -> None:
        assert {source.name for source in self.made(None).free} == {"lookup"}
        assert self.made(None).assistants == []
        assert self.made(None).hidden_layers == ()
        assert self.made(None).virtual_tokens is None

    def test_needs_are_those_of_all(self) -> None:
        drafter = self.made(assistants("all"))
        assert drafter.hidden_layers == (-1,)
        assert drafter.virtual_tokens is not None
        assert not drafter.samples

    def test_refusals(self, tmp_path: Path) -> None:
        model = build("llama")
        other = SpecAdapter("medusa", BaseModel.of(model), {}, {"w": torch.zeros(1)})
        save_adapter(tmp_path, other)
        cases: list[tuple[Any, str]] = [
            ([], "is empty"),
            (tmp_path, "method 'medusa'; known methods: disco, draft, falcon, sdsat"),
            (other, "method 'medusa'"),
            ([sdsat_adapter("llama")] * 2, "several SDSAT adapters"),
            (3, "not a draft model"),
            ([draft_model("llama"), None], "needs a draft model"),
            (str(tmp_path / "nowhere"), "cannot be loaded"),
        ]
        for assistant, message in cases:
            refuse(message, error=AssistantError, spec_strategy="auto", assistant=assistant)

    @pytest.mark.parametrize("name", ["tree", "falcon"])
    def test_drafts_are_common_in_short_texts(self, name: str) -> None:
        drafted = []
        for config in (AutoConfig(timings=DEAR), AutoConfig(timings=DEAR).for_short_texts()):
            output = build("llama").generate(
                **prompts("llama", "one"),
                max_new_tokens=3,
                num_return_sequences=50,
                do_sample=True,
                return_dict_in_generate=True,
                spec_strategy=config,
                assistant=assistants(name),
            )
            drafted.append(output.spec_stats.drafted_tokens)
        assert drafted[0] == 0
        assert drafted[1] > 50

    def test_timings_must_know_the_assistants(self) -> None:
        config = AutoConfig(timings={"verify": [[1, 1.0]], "draft": {"falcon": [[1, 1.0]]}})
        with pytest.raises(OptionError, match=r"timings\['draft'\] lacks 'tree'; it has 'falcon'"):
            hf_spec.methods.registry.make_drafter(config, build("llama"), draft_model("llama"))

    def test_a_wrong_set_of_timings(self) -> None:
        with pytest.raises(OptionError, match="timings="):
            AutoConfig(timings={"verify": 3})
