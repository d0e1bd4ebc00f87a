"""Every contender generates what plain `generate()` does, and its forwards are counted."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import pytest
import torch

from hf_spec import (
    LookupConfig,
    TreeConfig,
    UnsupportedError,
)
from hf_spec.evaluation.bench import contenders as ways
from hf_spec.evaluation.bench.contenders import GREEDY, BaselineOutputs
from tests.model_watch import count_forwards
from tests.tiny_models import draft_model, ragged_batch, settled_prompt

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
    lookup = {**GREEDY, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}
    contenders = [
        ways.transformers("lookup of others", model, lookup, batches=False),
        ways.transformers("assistant", model, {**GREEDY, "assistant_model": copy.deepcopy(draft)}),
        ways.strategy(model, LookupConfig()),
        ways.strategy(model, TreeConfig(), draft),
    ]
    assert [c.name for c in contenders] == [
        "lookup of others",
        "assistant",
        "lookup",
        "tree",
    ]
    for contender in contenders:
        with count_forwards(model) as calls:
            run = contender.run(ids, NEW_TOKENS)
        assert torch.equal(run.sequence, expected), contender.name
        assert run.target_forwards == len(calls) > 0
        assert contender.prepare is None


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
    assert contender.prepare is not None
    assert not contender.batches
    ids = settled_prompt("llama")
    run = contender.run(ids, NEW_TOKENS)
    assert torch.equal(run.sequence, ways.plain(model).run(ids, NEW_TOKENS).sequence)
    assert 0 < (contender.prepare(ids, NEW_TOKENS, None) or 0) <= NEW_TOKENS


def test_padded_rows_are_generated_as_if_alone(model: Any) -> None:
    batch = ragged_batch((9, 5, 7))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = BaselineOutputs(ways.plain(model))(ids, NEW_TOKENS, mask)
    for contender in (
        ways.plain(model),
        ways.strategy(model, LookupConfig()),
        ways.strategy(model, TreeConfig(), draft_model("llama")),
    ):
        run = contender.run(ids, NEW_TOKENS, mask)
        assert run.sequences[:, ids.shape[1] :].tolist() == expected, contender.name
        assert contender.batches


def test_sampling_is_a_setting(model: Any) -> None:
    ids = settled_prompt("llama")
    settings = {"do_sample": True, "temperature": 2.0}
    for contender in (
        ways.plain(model, settings),
        ways.transformers("lookup", model, {**settings, "prompt_lookup_num_tokens": 5}),
        ways.strategy(model, LookupConfig(), settings=settings),
    ):
        outputs = set()
        for seed in range(4):
            torch.manual_seed(seed)
            outputs.add(tuple(contender.run(ids, NEW_TOKENS).sequence.tolist()))
        assert len(outputs) > 1, contender.name


class TestCompiled:
    @pytest.fixture
    def compiles(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Functions given to torch.compile, which traces them but makes no code: that is slow."""
        made: list[Any] = []
        compile_ = torch.compile

        def traced(function: Any, **options: Any) -> Any:
            made.append(function)
            return compile_(function, backend="eager")

        monkeypatch.setattr(torch, "compile", traced)
        return made

    def test_it_says_what_plain_says(self, model: Any, compiles: list[Any]) -> None:
        model = copy.deepcopy(model)
        contender = ways.compiled(model)
        ids = settled_prompt("llama")
        run = contender.run(ids, 6, torch.ones_like(ids))
        assert torch.equal(run.sequence, ways.plain(model).run(ids, 6).sequence)
        assert run.target_forwards == 6
        assert len(compiles) == 1
        assert contender.compiles

    def test_what_cannot_be_compiled_is_said_before_anything_is_timed(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        monkeypatch.setattr(torch, "compile", broken)
        with pytest.raises(UnsupportedError, match=r"cannot be compiled here.*no C\+\+ compiler"):
            ways.compiled(copy.deepcopy(model))
