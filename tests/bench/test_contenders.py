"""Every contender generates what plain `generate()` does, and its forwards are counted."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch

from hf_spec import FalconConfig, GsdConfig, LookupConfig, OptionError, StrategyConfig, TreeConfig
from hf_spec.bench import contenders as ways
from tests.model_watch import count_forwards
from tests.tiny_models import draft_model, settled_prompt

NEW_TOKENS = 20


def test_plain_takes_one_forward_per_token(model: Any) -> None:
    ids = settled_prompt("llama")
    run = ways.plain(model).run(ids, NEW_TOKENS)
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(run.sequence, expected[0])
    assert run.target_forwards == NEW_TOKENS
    assert run.stats is None


def test_the_hook_that_counts_is_gone_afterwards(model: Any) -> None:
    hooks = len(model._forward_pre_hooks)
    contender = ways.plain(model)
    contender.run(settled_prompt("llama"), 2)
    with pytest.raises(TypeError):
        contender.run(settled_prompt("llama"), "three")  # type: ignore[arg-type]
    assert len(model._forward_pre_hooks) == hooks


def test_the_others_agree_with_plain(model: Any) -> None:
    ids, draft = settled_prompt("llama"), draft_model("llama")
    expected = ways.plain(model).run(ids, NEW_TOKENS).sequence
    contenders = [
        ways.transformers_lookup(model, 2, 5),
        ways.transformers_assistant(model, copy.deepcopy(draft)),
        ways.strategy(model, LookupConfig()),
        ways.strategy(model, TreeConfig(), draft),
    ]
    assert [c.name for c in contenders] == [
        "transformers lookup",
        "transformers assistant",
        "lookup",
        "tree",
    ]
    for contender in contenders:
        with count_forwards(model) as calls:
            run = contender.run(ids, NEW_TOKENS)
        assert torch.equal(run.sequence, expected), contender.name
        assert run.target_forwards == len(calls) > 0
        assert contender.count is None


def test_a_strategy_tells_its_statistics(model: Any) -> None:
    contender = ways.strategy(model, LookupConfig(), name="ours")
    run = contender.run(settled_prompt("llama"), NEW_TOKENS)
    assert contender.name == "ours"
    assert run.stats is not None
    assert run.stats.target_forwards == run.target_forwards
    assert run.stats.accepted_tokens > 0


def test_economize(model: Any) -> None:
    contender = ways.economize_lookup(copy.deepcopy(model), 2, 5)
    if importlib.util.find_spec("economize") is None:
        assert contender is None
        pytest.skip("economize is not installed")
    assert contender is not None
    assert contender.count is not None
    ids = settled_prompt("llama")
    run = contender.run(ids, NEW_TOKENS)
    assert torch.equal(run.sequence, ways.plain(model).run(ids, NEW_TOKENS).sequence)
    assert 0 < contender.count(ids, NEW_TOKENS) <= NEW_TOKENS


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
    assert ways.parse_entry(text) == (text, config, assistant)


def test_an_unknown_strategy_or_option() -> None:
    with pytest.raises(OptionError, match="unknown spec_strategy 'no'"):
        ways.parse_entry("no@x")
    with pytest.raises(OptionError, match="no option depth"):
        ways.parse_entry("tree:depth=2@x")
