"""Command-line entries: strategies, their options, and their assistants."""

from __future__ import annotations

import copy
import dataclasses

import pytest

from hf_spec import (
    AssistantError,
    FalconConfig,
    GsdConfig,
    LookupConfig,
    OptionError,
    StrategyConfig,
    TreeConfig,
)
from hf_spec.methods.auto.drafter import CHEAP_DRAFTS
from hf_spec.methods.entries import (
    parse_entries,
    parse_entry,
    resolve_entry,
    with_baseline,
)
from tests.tiny_models import build


@pytest.mark.parametrize(
    ("text", "config", "assistant"),
    [
        ("lookup", LookupConfig(), None),
        (
            "tree:children=2,length_policy=heuristic@a/b",
            TreeConfig(children=2, length_policy="heuristic"),
            "a/b",
        ),
        ("gsd:merge_length=null@x", GsdConfig(merge_length=None), "x"),
        (
            "falcon:tree=[[0],[0,0],[1]],max_nodes=2@x",
            FalconConfig(tree=[[0], [0, 0], [1]], max_nodes=2),
            "x",
        ),
    ],
)
def test_an_entry(text: str, config: StrategyConfig, assistant: str | None) -> None:
    assert parse_entry(text, compile_layers=None) == (text, config, assistant)
    assert parse_entry(text) == (text, dataclasses.replace(config, compile=True), assistant)


def test_short_texts_replace_measured_sizes_alone() -> None:
    draft, tree = parse_entries(["draft@x", "tree:max_draft_tokens=3@x"])
    assert draft.config.leaves_sizes_open
    assert not draft.for_short_texts.config.leaves_sizes_open
    assert draft.for_short_texts.config.length_policy == "static"
    assert tree.for_short_texts.config.max_draft_tokens == 3
    none, auto = parse_entries(["none", "auto:max_nodes=5"])
    assert none.for_short_texts == none
    assert auto.for_short_texts.config == dataclasses.replace(auto.config, timings=CHEAP_DRAFTS)


def test_an_unknown_strategy_or_option() -> None:
    with pytest.raises(OptionError, match="unknown spec_strategy 'no'"):
        parse_entry("no@x")
    with pytest.raises(OptionError, match="no option depth"):
        parse_entry("tree:depth=2@x")


def test_the_engine_alone_is_always_a_baseline() -> None:
    for texts, names in (
        (["lookup"], ["none", "lookup"]),
        (["lookup", "none"], ["lookup", "none"]),
        (["none:compile=false"], ["none:compile=false"]),
        ([], ["none"]),
    ):
        assert [entry.name for entry in with_baseline(parse_entries(texts))] == names


class TestAssistants:
    def test_they_go_to_strategies_that_take_one_and_name_none(self) -> None:
        given = [a for *_, a in parse_entries(["lookup", "draft", "tree@x", "auto"], ["d"])]
        assert given == [None, "d", "x", "d"]
        assert [a for *_, a in parse_entries(["none", "auto"], ["d", "f"])] == [None, ["d", "f"]]
        assert [a for *_, a in parse_entries(["none", "auto"])] == [None, None]

    def test_one_that_is_missing(self) -> None:
        with pytest.raises(AssistantError, match="--strategy gsd needs --assistant"):
            parse_entries(["gsd"])

    def test_one_that_nobody_takes(self) -> None:
        with pytest.raises(OptionError, match="--assistant d: none of the named strategies uses"):
            parse_entries(["none", "tree@x"], ["d"])
        [entry] = parse_entries(["lookup"], ["d"], others_follow=True)
        assert entry.assistant is None


def test_what_its_assistant_is_to_a_model() -> None:
    model = copy.deepcopy(build("llama"))
    found = resolve_entry(parse_entry("tree:max_nodes=5@truncated:2"), model)
    assert found.name == "tree:max_nodes=5@truncated:2"
    assert found.assistant.config.num_hidden_layers == 2
    assert resolve_entry(parse_entry("lookup"), model).assistant is None
    with pytest.raises(AssistantError, match="cannot be loaded"):
        resolve_entry(parse_entry("draft@/no/such"), model)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ("lookup", "lookup"),
        ("tree:max_nodes=5@a/b/small", "tree:max_nodes=5@small"),
        ("draft@truncated:2", "draft@truncated:2"),
    ],
)
def test_names_in_tables_are_short(entry: str, name: str) -> None:
    assert parse_entry(entry).short_name == name


def test_layers_are_compiled_unless_the_option_says_otherwise() -> None:
    texts = ["lookup", "lookup:compile=false", "lookup:compile=true"]
    assert [entry.config.compile for entry in parse_entries(texts)] == [True, False, True]
