"""One generation: its output object, and caches that later calls reuse."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList

from hf_spec import LookupConfig, SpecGenerateOutput, SpecStats
from hf_spec.common.compat import CACHE_NAME, output_cache
from hf_spec.engine.decode.verifiers import NodeDraw
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.lookup.drafter import LookupDrafter
from tests import criteria, tiny_models
from tests.model_watch import count_forwards
from tests.tiers import FEW_STRATEGIES

STRATEGIES = tiny_models.STRATEGIES
SLIDING = ("gemma3", "mistral_sliding")
CACHED = ("llama", "bloom", *SLIDING)
NEW_TOKENS = 12


def plain(name: str, **options: Any) -> Any:
    given = {"max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    return tiny_models.build(name).generate(**given)


def speculate(name: str, strategy: str, **options: Any) -> Any:
    return plain(name, **tiny_models.speculation(name, strategy), **options)


def next_turn(prompt: dict[str, Tensor], sequences: Tensor) -> dict[str, Tensor]:
    """Return the first turn plus three new tokens as a prompt, with unchanged padding."""
    rows = sequences.shape[0]
    more = torch.arange(3 * rows).reshape(rows, 3) + 20
    mask = prompt.get("attention_mask", torch.ones_like(prompt["input_ids"]))
    new = sequences.shape[1] + 3 - mask.shape[1]
    return {
        "input_ids": torch.cat([sequences, more], dim=1),
        "attention_mask": torch.cat([mask, mask.new_ones(rows, new)], dim=1),
    }


def check_same_cache(actual: DynamicCache, expected: DynamicCache, masks: Tensor) -> None:
    """Check for equal layers and shapes, and equal keys and values of all real tokens."""
    assert type(actual) is type(expected)
    assert actual.get_seq_length() == expected.get_seq_length()
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        assert type(ours) is type(theirs)
        assert ours.keys.shape == theirs.keys.shape
        assert ours.get_seq_length() == theirs.get_seq_length()
        real = masks[:, : actual.get_seq_length()][:, -ours.keys.shape[2] :].bool()
        for row, kept in enumerate(real):
            for mine, right in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(
                    mine[row][:, kept], right[row][:, kept], atol=2e-4, rtol=1e-4
                )


class Hesitant(NodeDraw):
    """Verifier that accepts no draft token, which is also lossless."""

    def _step(self, *args: Any) -> dict[int, tuple[int, int | None]]:
        return {row: (token, None) for row, (token, _) in super()._step(*args).items()}


class HesitantDrafter(LookupDrafter):
    """Drafter with its own verifier and a counter of `make_verifier()` calls."""

    def __init__(self) -> None:
        super().__init__(LookupConfig())
        self.counters = {"asked": 0}

    def make_verifier(self, processors: Any, num_rows: int) -> Hesitant:
        self.counters = {**self.counters, "asked": self.counters["asked"] + 1}
        return Hesitant(processors, num_rows)


@pytest.mark.parametrize("kind", ["one", "ragged"])
def test_a_drafter_may_bring_its_own_rule_and_counts(kind: str) -> None:
    prompt = tiny_models.prompts("llama", kind)
    expected = plain("llama", **prompt)
    drafter = HesitantDrafter()
    output = plain(
        "llama",
        **prompt,
        custom_generate=partial(generate_with, drafter),
        return_dict_in_generate=True,
    )
    assert torch.equal(output.sequences, expected)
    stats = output.spec_stats
    assert stats.drafted_tokens > 0
    assert stats.accepted_tokens == 0
    assert stats.target_forwards == NEW_TOKENS
    assert stats.counters == {"asked": 1}
    assert stats.counters is not drafter.counters


def test_without_a_dictionary_it_is_a_tensor() -> None:
    prompt = tiny_models.prompts("llama", "one")
    output = speculate("llama", "lookup", **prompt)
    assert type(output) is Tensor
    assert output.dtype == prompt["input_ids"].dtype


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_fields_are_those_of_plain_generate(strategy: str, kind: str) -> None:
    prompt = tiny_models.prompts("llama", kind)
    expected = plain("llama", **prompt, return_dict_in_generate=True)
    output = speculate("llama", strategy, **prompt, return_dict_in_generate=True)
    assert isinstance(output, SpecGenerateOutput)
    assert isinstance(output, type(expected))
    assert set(output) - {"spec_stats"} == set(expected)
    assert output.sequences.tolist() == expected.sequences.tolist()
    assert output.scores is output.logits is output.attentions is output.hidden_states is None
    assert isinstance(output.spec_stats, SpecStats)
    assert len(output.spec_stats.rows) == len(prompt["input_ids"])
    mask = next_turn(prompt, output.sequences)["attention_mask"]
    check_same_cache(output_cache(output), output_cache(expected), mask)


@pytest.mark.by_default(name=("llama",), strategy=FEW_STRATEGIES)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        (name, strategy)
        for name in ("llama", "gemma3", "bloom")
        for strategy in STRATEGIES
        if tiny_models.is_served(name, strategy)
    ],
)
def test_scores_and_logits_are_those_of_plain_generate(name: str, strategy: str) -> None:
    options = {
        **tiny_models.prompts(name, "one"),
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "repetition_penalty": 1.2,
    }
    expected, output = plain(name, **options), speculate(name, strategy, **options)
    assert output.sequences.tolist() == expected.sequences.tolist()
    for ours, theirs in ((output.scores, expected.scores), (output.logits, expected.logits)):
        assert isinstance(ours, tuple)
        assert len(ours) == len(theirs) == NEW_TOKENS
        for step, right in zip(ours, theirs, strict=True):
            assert step.shape == right.shape == (1, tiny_models.VOCAB)
            assert step.dtype == right.dtype == torch.float32
            torch.testing.assert_close(step, right, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(output.scores[-1], output.logits[-1], atol=1e-2)


@pytest.mark.by_default(strategy=("tree", "falcon"))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scores_stop_where_a_block_is_cut(strategy: str) -> None:
    options = {
        **tiny_models.prompts("llama", "one"),
        "return_dict_in_generate": True,
        "output_scores": True,
    }
    said = plain("llama", **options).sequences[0, -NEW_TOKENS:]
    for end in dict.fromkeys(said.tolist()):
        expected = plain("llama", **options, eos_token_id=end)
        output = speculate("llama", strategy, **options, eos_token_id=end)
        assert output.sequences.tolist() == expected.sequences.tolist()
        assert len(output.scores) == len(expected.scores)
        torch.testing.assert_close(output.scores[-1], expected.scores[-1], atol=1e-4, rtol=1e-4)


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_samples_of_one_prompt(strategy: str) -> None:
    prompt = tiny_models.prompts("llama", "one")
    width = prompt["input_ids"].shape[1]
    torch.manual_seed(0)
    output = speculate(
        "llama",
        strategy,
        **prompt,
        do_sample=True,
        top_k=0,
        temperature=2.0,
        num_return_sequences=3,
        return_dict_in_generate=True,
        output_scores=True,
    )
    assert output.sequences.shape == (3, width + NEW_TOKENS)
    assert torch.equal(output.sequences[:, :width], prompt["input_ids"].expand(3, -1))
    assert len({tuple(row) for row in output.sequences[:, width:].tolist()}) == 3
    assert len(output.spec_stats.rows) == 3
    assert [step.shape for step in output.scores] == [(3, tiny_models.VOCAB)] * NEW_TOKENS


@pytest.mark.by_default(strategy=("tree",), kind=("ragged",))
@pytest.mark.smoke
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("name", CACHED)
def test_two_turns_with_one_cache(name: str, kind: str, strategy: str) -> None:
    """As in a chat, the second prompt repeats the first turn and reuses its cache."""
    model, prompt = tiny_models.build(name), tiny_models.prompts(name, kind)
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    expected = plain(name, **prompt, **{CACHE_NAME: theirs})
    output = speculate(name, strategy, **prompt, **{CACHE_NAME: ours})
    assert output.tolist() == expected.tolist()
    check_same_cache(ours, theirs, next_turn(prompt, output)["attention_mask"])

    again = next_turn(prompt, output)
    expected = plain(name, **again, **{CACHE_NAME: theirs})
    output = speculate(name, strategy, **again, **{CACHE_NAME: ours}, return_dict_in_generate=True)
    assert output.sequences.tolist() == expected.tolist()
    assert output_cache(output) is ours
    check_same_cache(ours, theirs, next_turn(again, output.sequences)["attention_mask"])


@pytest.mark.by_default(kind=("ragged",), name=("llama", "gemma3"))
@pytest.mark.parametrize("kind", ["one", "ragged"])
@pytest.mark.parametrize("name", CACHED)
@pytest.mark.parametrize("first_is_plain", [True, False])
def test_a_cache_goes_from_one_kind_of_call_to_the_other(
    first_is_plain: bool, name: str, kind: str
) -> None:
    prompt = tiny_models.prompts(name, kind)
    calls = [lambda **o: plain(name, **o), lambda **o: speculate(name, "tree", **o)]
    first, second = calls if first_is_plain else reversed(calls)
    output = first(**prompt, return_dict_in_generate=True)
    again = next_turn(prompt, output.sequences)
    # Plain `generate()` with a new cache.
    expected = plain(name, **again)
    continued = second(**again, **{CACHE_NAME: output_cache(output)})
    assert continued.tolist() == expected.tolist()


@pytest.mark.by_default(strategy=FEW_STRATEGIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_reused_cache_is_not_computed_again(strategy: str) -> None:
    prompt = tiny_models.prompts("llama", "ragged")
    target = tiny_models.build("llama")
    output = plain("llama", **prompt, return_dict_in_generate=True)
    again = next_turn(prompt, output.sequences)
    entering: list[int] = []
    # Only the target runs its last layer; drafters may share the others.
    handle = target.model.layers[2].self_attn.q_proj.register_forward_pre_hook(
        lambda _, args: entering.append(args[0].shape[:-1].numel())
    )
    try:
        speculate("llama", strategy, **again, **{CACHE_NAME: output_cache(output)})
    finally:
        handle.remove()
    # Per row: the last token of the first turn, two of the second one, and a draft tree.
    rows = len(again["input_ids"])
    assert entering[0] <= rows * (3 + 16)


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
@pytest.mark.parametrize("name", CACHED)
def test_a_row_that_ends_early_leaves_the_cache_of_plain_generate(name: str, strategy: str) -> None:
    """Plain `generate()` caches its last token and padding; the next turn attends to both."""
    model, prompt = tiny_models.build(name), tiny_models.prompts(name, "ragged")
    said = plain(name, **prompt)[:, -NEW_TOKENS:]
    for position in (1, 4):
        end = int(said[0, position])
        theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
        expected = plain(name, **prompt, eos_token_id=end, **{CACHE_NAME: theirs})
        output = speculate(name, strategy, **prompt, eos_token_id=end, **{CACHE_NAME: ours})
        assert output.tolist() == expected.tolist()
        assert (output[:, -1] == 0).any(), "some row has to end before the last one"
        again = next_turn(prompt, output)
        check_same_cache(ours, theirs, again["attention_mask"])
        expected = plain(name, **again, **{CACHE_NAME: theirs})
        output = speculate(name, strategy, **again, **{CACHE_NAME: ours})
        assert output.tolist() == expected.tolist()


@pytest.mark.by_default(name=("llama",))
@pytest.mark.parametrize("padded", [True, False], ids=["padded", "together"])
@pytest.mark.parametrize("strategy", ["lookup", "tree", "sdsat"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_that_a_criterion_cuts_leave_the_cache_of_plain_generate(
    name: str, strategy: str, padded: bool
) -> None:
    """Tokens accepted past a stop must not appear in the cache or affect the next turn."""
    model, prompt = tiny_models.build(name), tiny_models.prompts(name, "ragged")
    said = plain(name, **prompt)[:, -NEW_TOKENS:]
    rules = [criteria.AfterCalls(7), criteria.EachRowSays([int(said[3, 2])])]
    options: dict[str, Any] = {"eos_token_id": int(said[2, 1])} if padded else {}
    theirs, ours = DynamicCache(config=model.config), DynamicCache(config=model.config)
    call = {**prompt, "max_new_tokens": NEW_TOKENS, "do_sample": False, **options}
    expected, _, _ = criteria.run(model, {**call, CACHE_NAME: theirs}, rules)
    call |= {CACHE_NAME: ours, **tiny_models.speculation(name, strategy)}
    output, _, _ = criteria.run(model, call, rules)
    assert output.tolist() == expected.tolist()
    assert output.shape[1] == prompt["input_ids"].shape[1] + 7
    again = next_turn(prompt, output)
    check_same_cache(ours, theirs, again["attention_mask"])
    expected = plain(name, **again, **{CACHE_NAME: theirs})
    output = speculate(name, strategy, **again, **{CACHE_NAME: ours})
    assert output.tolist() == expected.tolist()


@pytest.mark.parametrize("kind", ["one", "ragged"])
def test_the_forward_for_the_cache_is_counted(kind: str) -> None:
    target, prompt = tiny_models.build("llama"), tiny_models.prompts("llama", kind)
    end = int(plain("llama", **prompt)[0, -NEW_TOKENS + 1])
    options = {**prompt, "eos_token_id": end, "return_dict_in_generate": True}
    with count_forwards(target) as calls:
        stats = speculate("llama", "lookup", **options).spec_stats
    assert stats.target_forwards == len(calls)
    in_rounds = max(row.target_forwards for row in stats.rows)
    assert stats.target_forwards == in_rounds + (kind == "ragged")


class Slow(StoppingCriteria):
    """Criterion that never stops and delays each token by 20 ms."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        time.sleep(0.02)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


@pytest.mark.parametrize("strategy", ["lookup", "tree"])
def test_max_time_stops_early(strategy: str) -> None:
    prompt = tiny_models.prompts("llama", "one")
    width = prompt["input_ids"].shape[1]
    options = {**prompt, "max_new_tokens": 100, "max_time": 0.2}
    output = speculate(
        "llama", strategy, **options, stopping_criteria=StoppingCriteriaList([Slow()])
    )
    assert width < output.shape[1] <= width + 15
    expected = plain("llama", **prompt, max_new_tokens=15)
    assert output.tolist() == expected[:, : output.shape[1]].tolist()


def test_a_prompt_without_a_mask_is_all_text() -> None:
    """Padding tokens in the mask are text; without mask or padding, all tokens are."""
    ids = tiny_models.settled_prompt("llama").clone()
    ids[0, :2] = 0
    mask = torch.ones_like(ids)
    expected = plain("llama", input_ids=ids, attention_mask=mask)
    output = speculate("llama", "lookup", input_ids=ids, attention_mask=mask)
    assert output.tolist() == expected.tolist()
    other = tiny_models.settled_prompt("llama")
    with count_forwards(tiny_models.build("llama")) as calls:
        output = speculate("llama", "lookup", input_ids=other)
    assert len(calls) <= NEW_TOKENS
    assert output.tolist() == plain("llama", input_ids=other).tolist()
