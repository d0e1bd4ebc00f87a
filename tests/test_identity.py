"""Greedy speculative decoding yields the tokens of plain `generate()`, in a matrix of tests.

Every architecture runs with every strategy, on one sequence and on a ragged batch with left
padding. Every option that changes or ends the output runs with every strategy on six architectures,
which cover the packed path, sliding windows, attention sinks, and both kinds of the rectangular
path. Each remaining architecture runs with one option per strategy, in rotation. The default tier
has a few architectures of the first group, and none of the last.

A draft that is never accepted proves nothing, so each test also counts accepted tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from hf_spec import SpecGenerateOutput, UnsupportedError
from hf_spec.common.outputs import RowStats
from hf_spec.engine import runner
from hf_spec.engine.forward import attention_span, sdpa_attention
from tests import tiny_models
from tests.identity import assert_identical
from tests.tiny_models import ARCHITECTURES, MATRIX, PUBLISHED

# Without drafts no token can be accepted; tests/methods/test_none.py tests that strategy.
STRATEGIES = tuple(name for name in MATRIX if name != "none")

NEW_TOKENS = 16
UNSAID = tiny_models.VOCAB - 1
KINDS = ("one", "ragged")
REPRESENTATIVES = ("bloom", "falcon_alibi", "gemma3", "gpt_oss", "llama", "mistral_sliding")
# Also multi-head latent attention and a mixture of experts.
QUICK = (*REPRESENTATIVES, "deepseek_v3", "mixtral")
OTHERS = [name for name in ARCHITECTURES if name not in REPRESENTATIVES]


class EndOnRepeat(StoppingCriteria):
    """Criterion that ends a row if the `reach` tokens before its newest have that token twice."""

    reach = 10

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        before = input_ids[:, -self.reach - 1 : -1]
        return (before == input_ids[:, -1:]).sum(dim=1) >= 2


def nothing(name: str, kind: str) -> dict[str, Any]:
    return {}


def repetition_penalty(name: str, kind: str) -> dict[str, Any]:
    return {"repetition_penalty": 1.3}


def no_repeat_ngram(name: str, kind: str) -> dict[str, Any]:
    return {"no_repeat_ngram_size": 3}


def min_new_tokens(name: str, kind: str) -> dict[str, Any]:
    """Use tokens that the model generates early as EOS, but not before the ninth token."""
    early = free_tokens(name, kind)[:, 2:5].flatten().tolist()
    return {"min_new_tokens": 9, "eos_token_id": sorted(set(early))}


def stop_string(name: str, kind: str) -> dict[str, Any]:
    """Use a stop string that starts inside a token of row 0 and ends inside the second after it."""
    tokenizer = tiny_models.tokenizer()
    text = tokenizer.decode(free_tokens(name, kind)[0, 4:7].tolist())
    strings = [text[1:-1], "never said"]
    # The EOS token enables padding of ended rows; it is never generated.
    return {"stop_strings": strings, "tokenizer": tokenizer, "eos_token_id": [UNSAID]}


def custom_criterion(name: str, kind: str) -> dict[str, Any]:
    criteria = StoppingCriteriaList([EndOnRepeat()])
    return {"stopping_criteria": criteria, "eos_token_id": [UNSAID]}


def no_padding(name: str, kind: str) -> dict[str, Any]:
    """Use no EOS token, so that no row is padded: all run until each has met a criterion."""
    return {"stopping_criteria": StoppingCriteriaList([EndOnRepeat()])}


OPTIONS: tuple[Callable[[str, str], dict[str, Any]], ...] = (
    repetition_penalty,
    no_repeat_ngram,
    min_new_tokens,
    stop_string,
    custom_criterion,
    no_padding,
)


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Use one thread; a second one only slows such small matmuls."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def plain(name: str, kind: str, option: Callable[[str, str], dict[str, Any]] = nothing) -> Tensor:
    model = tiny_models.build(name)
    return model.generate(
        **tiny_models.prompts(name, kind),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        **option(name, kind),
    )


@cache
def ended(name: str, kind: str, eos: int) -> list[list[int]]:
    """Return the output of plain generate() with `eos` as EOS token."""
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": eos}
    return tiny_models.build(name).generate(**tiny_models.prompts(name, kind), **given).tolist()


def free_tokens(name: str, kind: str) -> Tensor:
    """Return (B, NEW_TOKENS) tokens of plain generate() without options."""
    return plain(name, kind)[:, -NEW_TOKENS:]


def check_call(
    name: str, kind: str, strategy: str, expected: Any, **options: Any
) -> SpecGenerateOutput:
    call = {
        **tiny_models.prompts(name, kind),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
        **tiny_models.speculation(name, strategy),
        **options,
    }
    model = tiny_models.build(name)
    output = model.generate(**call)
    assert_identical(model, call, output, expected, tokenizer=tiny_models.tokenizer())
    return output


# Cases in which no accepted token of the random drafter can be an EOS token.
NO_ACCEPTED_END = {
    ("gemma3", "falcon", "one"),
    ("gemma3", "falcon", "ragged"),
    ("gemma3", "sdsat", "one"),
    ("falcon_alibi", "sdsat", "one"),
}


def check_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match="takes no attention function"):
        tiny_models.build(name).generate(
            **tiny_models.prompts(name, "one"), spec_strategy="falcon", assistant="no-such-head"
        )


def check_option(
    name: str, kind: str, strategy: str, option: Callable[[str, str], dict[str, Any]]
) -> SpecGenerateOutput:
    expected = plain(name, kind, option)
    return check_call(name, kind, strategy, expected, **option(name, kind))


# Strategies that are run with the oldest supported transformers, too.
SMOKE_STRATEGIES = ("lookup", "falcon")


def on_all_architectures(strategy: str) -> list[Any]:
    """Return one case per architecture; strategies that differ only in the drafter are slow."""
    marks = [pytest.mark.slow] if strategy in PUBLISHED else []
    marks += [pytest.mark.smoke] if strategy in SMOKE_STRATEGIES else []
    return [pytest.param(name, strategy, marks=marks) for name in ARCHITECTURES]


@pytest.mark.by_default(name=QUICK, strategy=("lookup", "tree", "falcon"))
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        case
        for strategy in (*STRATEGIES, "eagle", "block", "heads")
        for case in on_all_architectures(strategy)
    ],
)
def test_every_architecture_and_strategy(name: str, strategy: str) -> None:
    if not tiny_models.is_served(name, strategy):
        check_refused(name)
        return
    accepted = 0
    for kind in KINDS:
        output = check_option(name, kind, strategy, nothing)
        assert output.spec_stats.target_forwards <= NEW_TOKENS
        accepted += output.spec_stats.accepted_tokens
    assert accepted > 0


@pytest.mark.by_default(name=QUICK, strategy=("lookup",))
@pytest.mark.parametrize("strategy", ["lookup", "falcon"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prompts_that_run_before_their_drafts(
    name: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small limits split short prompts into chunks and mask blocks, as for long prompts."""
    if not tiny_models.is_served(name, strategy):
        return
    for module in (attention_span, runner):
        monkeypatch.setattr(module, "STEP_TOKENS", 4)
    monkeypatch.setattr(runner, "PREFILL_CHUNK", 8)
    monkeypatch.setattr(sdpa_attention, "BLOCK", 3)
    monkeypatch.setattr(sdpa_attention, "MAX_COPIED_KEYS", 4)
    accepted = 0
    for kind in KINDS:
        output = check_option(name, kind, strategy, nothing)
        accepted += output.spec_stats.accepted_tokens
    assert accepted > 0


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_every_option(option: Callable[..., Any], strategy: str) -> None:
    accepted = {
        name: sum(
            check_option(name, kind, strategy, option).spec_stats.accepted_tokens for kind in KINDS
        )
        for name in REPRESENTATIVES
        if tiny_models.is_served(name, strategy)
    }
    # Lookup drafts repetitions, which not every random model generates.
    needed = 2 if strategy == "lookup" else len(accepted)
    assert sum(count > 0 for count in accepted.values()) >= needed, accepted


@pytest.mark.full
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", OTHERS)
def test_options_in_rotation(name: str, strategy: str) -> None:
    turn = OTHERS.index(name) + STRATEGIES.index(strategy)
    option = OPTIONS[turn % len(OPTIONS)]
    if not tiny_models.is_served(name, strategy):
        check_refused(name)
        return
    check_option(name, KINDS[turn % len(KINDS)], strategy, option)


@pytest.mark.parametrize("strategy", PUBLISHED)
def test_drafters_that_others_publish(strategy: str) -> None:
    accepted = 0
    options = (nothing, repetition_penalty, min_new_tokens, stop_string)
    for turn, option in enumerate(options):
        name = PUBLISHED[strategy][turn % len(PUBLISHED[strategy])]
        output = check_option(name, KINDS[(turn + 1) % 2], strategy, option)
        accepted += output.spec_stats.accepted_tokens
    assert accepted > 0


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.__name__)
def test_an_option_changes_the_output(option: Callable[..., Any]) -> None:
    """An option without effect would make the tests above compare the same output twice."""
    changed = [
        name
        for name in REPRESENTATIVES
        if any(not torch.equal(plain(name, kind, option), plain(name, kind)) for kind in KINDS)
    ]
    assert len(changed) >= 3


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_min_new_tokens_holds_the_end_back(name: str) -> None:
    banned = min_new_tokens(name, "ragged")["eos_token_id"]
    start = tiny_models.prompts(name, "ragged")["input_ids"].shape[1]
    said = plain(name, "ragged", min_new_tokens)[:, start:]
    assert not set(said[:, :9].flatten().tolist()) & set(banned)


def ended_inside_a_block(row: RowStats, generated: int) -> bool:
    """Return True if the last token of a row was a draft token.

    A round adds its accepted tokens and the bonus token; only the last round may lack the bonus.
    """
    return generated == row.accepted_tokens + row.target_forwards - 1


@pytest.mark.by_default(name=("llama",), strategy=("tree", "falcon"))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["falcon_alibi", "gemma3", "llama"])
def test_an_accepted_end_of_sequence_cuts_its_block(name: str, strategy: str, kind: str) -> None:
    if not tiny_models.is_served(name, strategy):
        check_refused(name)
        return
    if (name, strategy, kind) in NO_ACCEPTED_END:
        pytest.skip("no token that it says here is an accepted one the first time it is said")
    said = free_tokens(name, kind)
    cut = 0
    for tried, eos in enumerate(dict.fromkeys(said.t().flatten().tolist())):
        if tried >= (4 if cut else 12):
            break
        expected = ended(name, kind, eos)
        output = check_call(name, kind, strategy, expected, eos_token_id=eos)
        for tokens, row in zip(said.tolist(), output.spec_stats.rows, strict=True):
            if eos in tokens[:-1]:
                cut += ended_inside_a_block(row, tokens.index(eos) + 1)
    assert cut > 0, "no end of sequence fell on an accepted token"


@pytest.mark.by_default(strategy=("lookup", "falcon"))
@pytest.mark.parametrize("option", [stop_string, custom_criterion], ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stop_rule_cuts_an_accepted_block(
    strategy: str, option: Callable[[str, str], dict[str, Any]]
) -> None:
    cut = 0
    for name in REPRESENTATIVES:
        if not tiny_models.is_served(name, strategy):
            continue
        said, expected = free_tokens(name, "ragged"), plain(name, "ragged", option)
        output = check_option(name, "ragged", strategy, option)
        start = tiny_models.prompts(name, "ragged")["input_ids"].shape[1]
        for tokens, kept, row in zip(
            said, expected[:, start:], output.spec_stats.rows, strict=True
        ):
            same = tokens[: len(kept)] == kept
            generated = len(kept) if same.all() else int(same.int().argmin())
            if generated < NEW_TOKENS:
                cut += ended_inside_a_block(row, generated)
    assert cut > 0, "no stop rule was met by an accepted token"
