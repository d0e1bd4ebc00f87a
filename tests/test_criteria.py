"""Stopping criteria over whole batches are called and applied as in plain decoding."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

import hf_spec
from hf_spec import OptionError
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.evaluation.lossless.distribution import IMPOSSIBLE, chi_square
from tests import criteria, test_distribution, tiny_models
from tests.model_watch import count_forwards

NEW_TOKENS = 24


@cache
def said(name: str) -> Tensor:
    """Return (5, NEW_TOKENS) tokens that the model generates for the ragged batch."""
    batch = tiny_models.prompts(name, "ragged")
    output = tiny_models.build(name).generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    return output[:, batch["input_ids"].shape[1] :]


def word(name: str, row: int, position: int) -> list[int]:
    return [int(said(name)[row, position])]


KINDS: dict[str, Callable[[str], Any]] = {
    "counts its calls": lambda name: criteria.AfterCalls(9),
    "raises": lambda name: criteria.RaiseAtCall(7),
    "any row": lambda name: criteria.AnyRowSays(word(name, 4, 10)),
    "first row": lambda name: criteria.RowSays(word(name, 0, 6), 0),
    "last row": lambda name: criteria.RowSays(word(name, 4, 8), 4),
    "a tensor per row": lambda name: criteria.EachRowSays(
        [*word(name, 0, 4), *word(name, 2, 9), *word(name, 3, 2)]
    ),
    "remembers rows": lambda name: criteria.EachRowHasSaid(said(name)[:, 11].tolist()),
    "sum of the batch": lambda name: criteria.SumOfBatch(11),
    "different tokens": lambda name: criteria.LongestRun(6),
    "reads scores": lambda name: criteria.Confident(0.13),
}


def options(name: str, kind: str, padded: bool) -> dict[str, Any]:
    given = {
        **tiny_models.prompts(name, "ragged"),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "return_dict_in_generate": True,
    }
    if padded:
        # With an EOS token ended rows are padded; without one all rows run until the last ends.
        given["eos_token_id"] = word(name, 1, 5)
    if kind == "reads scores" or not padded:
        given |= {"output_scores": True, "output_logits": True}
    return given


@pytest.mark.by_default(strategy=("falcon",))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strategy", tiny_models.MATRIX)
def test_all_is_as_in_plain_decoding(strategy: str, kind: str) -> None:
    # Every kind runs with and without padding, with half of the strategies each.
    given = options("llama", kind, (len(kind) + tiny_models.MATRIX.index(strategy)) % 2 == 0)
    criteria.compare(
        tiny_models.build("llama"),
        given,
        [KINDS[kind]("llama")],
        tiny_models.speculation("llama", strategy),
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "raises"])
def test_these_criteria_end_something(kind: str) -> None:
    model = tiny_models.build("llama")
    given = options("llama", kind, padded=True)
    output, _, _ = criteria.run(model, given, [KINDS[kind]("llama")])
    assert output.sequences.tolist() != model.generate(**given).sequences.tolist()


@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("kind", ["any row", "a tensor per row", "reads scores"])
def test_whatever_is_padded(batching: str, kind: str) -> None:
    given = options("llama", kind, padded=True)
    config = hf_spec.LookupConfig(batching=batching)
    rules = [KINDS[kind]("llama")]
    criteria.compare(tiny_models.build("llama"), given, rules, {"spec_strategy": config})


def test_scores_of_rows_that_ended_are_computed_for_those_who_may_look() -> None:
    model = tiny_models.build("llama")
    given = options("llama", "any row", padded=True)
    forwards = {}
    for reads in (False, True):
        asked = criteria.Recording()
        wanted = {"output_scores": reads, "spec_strategy": "lookup"}
        with count_forwards(model) as counted:
            model.generate(**given, **wanted, stopping_criteria=StoppingCriteriaList([asked]))
        forwards[reads] = len(counted)
    with count_forwards(model) as counted:
        model.generate(**given, spec_strategy="lookup")
    assert forwards[False] == len(counted)
    assert forwards[True] > len(counted)


def test_a_harmless_criterion_changes_no_draft() -> None:
    model = tiny_models.build("llama")
    given = options("llama", "any row", padded=True) | {"spec_strategy": "lookup"}
    free = model.generate(**given)
    rules = StoppingCriteriaList([criteria.Recording()])
    output = model.generate(**given, stopping_criteria=rules)
    assert output.spec_stats.rows == free.spec_stats.rows
    assert output.spec_stats.accepted_tokens > 0


class Spelled(TextStreamer):
    """Streamer of transformers that records its text."""

    def __init__(self) -> None:
        super().__init__(tiny_models.tokenizer(), skip_prompt=True)
        self.text = ""

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.text += text


@pytest.mark.parametrize("kind", ["counts its calls", "raises"])
def test_a_single_sequence_streams_what_plain_decoding_streams(kind: str) -> None:
    model = tiny_models.build("llama")
    texts = []
    for speculation in ({}, {"spec_strategy": "lookup"}):
        streamer = Spelled()
        given = {**tiny_models.prompts("llama", "one"), "max_new_tokens": NEW_TOKENS}
        given |= {"do_sample": False, "streamer": streamer, **speculation}
        _, error, _ = criteria.run(model, given, [KINDS[kind]("llama")])
        assert bool(error) == (kind == "raises")
        streamer.end()
        texts.append(streamer.text)
    assert texts[0] == texts[1] != ""


class OwnEnd(StoppingCriteria):
    """Criterion with its own EOS token, so that rows are padded."""

    eos_token_id = torch.tensor([tiny_models.VOCAB])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return input_ids[:, -1] == self.eos_token_id


def test_padding_without_a_token_for_it_is_refused_before_the_first_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny_models.build("llama")
    monkeypatch.setattr(model.generation_config, "pad_token_id", None)
    given = {**tiny_models.prompts("llama", "ragged"), "max_new_tokens": 3, "do_sample": False}
    given["stopping_criteria"] = StoppingCriteriaList([OwnEnd()])
    with pytest.raises(TypeError):
        model.generate(**given)
    with (
        count_forwards(model) as counted,
        pytest.raises(OptionError, match=r"pad_token_id=None.*set pad_token_id="),
    ):
        model.generate(**given, spec_strategy="lookup")
    assert len(counted) == 0


END = 2
PAIRS = 50
DRAWS = 2_000


class EitherOfTwo(StoppingCriteria):
    """Criterion over pairs of rows: both end as soon as one of them generates END."""

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return (input_ids[:, -1] == END).reshape(2, PAIRS).any(dim=0).repeat(2)


def pairs_p_value(strategy: str) -> float:
    """Return the chi-square p-value of the first two tokens of row pairs against their joint."""
    prompts, size = test_distribution.RAGGED[:2], test_distribution.VOCAB
    batch = tiny_models.left_padded([torch.tensor(p) for p in prompts for _ in range(PAIRS)])
    torch.manual_seed(3)
    counts = torch.zeros(size**4, dtype=torch.long)
    for _ in range(DRAWS // PAIRS):
        output = test_distribution.tiny(0).generate(
            **batch,
            do_sample=True,
            top_k=0,
            max_new_tokens=3,
            # Enables padding by token 0. It is never generated: only the criterion ends rows.
            eos_token_id=[size + 1],
            stopping_criteria=StoppingCriteriaList([EitherOfTwo()]),
            **test_distribution.arguments(strategy),
        )
        new = torch.nn.functional.pad(output[:, batch["input_ids"].shape[1] :], (0, 2))[:, :2]
        first, second = (rows[:, 0] * size + rows[:, 1] for rows in new.split(PAIRS))
        counts += torch.bincount(first * size**2 + second, minlength=size**4)
    alone = [test_distribution.exact(p, {}, None).reshape(-1, size).sum(dim=1) for p in prompts]
    joint = (alone[0][:, None] * alone[1]).reshape((size,) * 4)
    ended = torch.zeros_like(joint)
    ended[:, 0, :, 0] = joint.sum(dim=(1, 3))
    either = torch.zeros((size,) * 4, dtype=torch.bool)
    either[END] = either[:, :, END] = True
    expected = (torch.where(either, ended, joint)).flatten() * counts.sum()
    impossible = int(counts[expected < IMPOSSIBLE * counts.sum()].sum())
    return chi_square(zip(expected.tolist(), counts.tolist(), strict=True), impossible).p_value


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["lookup", "siblings"])
def test_rows_that_end_each_other_are_sampled_from_their_joint_distribution(strategy: str) -> None:
    assert pairs_p_value(strategy) > test_distribution.ALPHA


def test_an_answer_that_comes_a_step_late_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    works, last = StopRules.end_rows, [[False] * 2 * PAIRS]

    def end_rows(self: StopRules, input_ids: Tensor, scores: Any) -> list[bool]:
        late, last[0] = last[0], works(self, input_ids, scores)
        return late

    monkeypatch.setattr(StopRules, "end_rows", end_rows)
    assert pairs_p_value("lookup") < test_distribution.REJECTED
