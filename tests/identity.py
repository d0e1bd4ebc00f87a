"""Comparison of a strategy's tokens with those of plain `generate()`, and a report if they differ.

The report has everything needed to reproduce and judge a failure: the call, the row's prompt, the
first difference, and the target's largest logits there. It takes one plain forward pass, or none
if the tokens are equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.evaluation.lossless import mismatch
from hf_spec.evaluation.lossless.mismatch import TIE, first_difference
from hf_spec.methods.registry import parse_strategy

BASELINE = "plain generate()"


def assert_identical(
    model: Any,
    call: Mapping[str, Any],
    output: Any,
    expected: Any,
    *,
    tokenizer: Any = None,
    baseline: str = BASELINE,
) -> None:
    """Raise `AssertionError` with a report unless two outputs have the same tokens.

    Args:
        model: the target model.
        call: arguments of the speculative call: `input_ids`, `attention_mask` if rows are padded,
            the strategy, and options.
        output: its token ids including the prompts: a (B, L) tensor, an object with `sequences`,
            or a list per row.
        expected: token ids of the baseline.
        tokenizer: adds texts to the report; default: the tokenizer of `call`.
        baseline: name of the source of `expected`.
    """
    report = difference(model, call, output, expected, tokenizer=tokenizer, baseline=baseline)
    if report:
        raise AssertionError(report)


def assert_identical_answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    call: Mapping[str, Any],
    answers: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    **options: Any,
) -> None:
    """Compare new tokens per prompt, as `generate_batch()` returns them; see `assert_identical`."""
    if answers != expected:
        whole, right = (
            [[*prompt, *tokens] for prompt, tokens in zip(prompts, rows, strict=True)]
            for rows in (answers, expected)
        )
        assert_identical(model, {**call, "input_ids": prompts}, whole, right, **options)


def difference(
    model: Any,
    call: Mapping[str, Any],
    output: Any,
    expected: Any,
    *,
    tokenizer: Any = None,
    baseline: str = BASELINE,
) -> str:
    """Return the report of the first row that differs, "" if all are equal."""
    rows, right = _lists(output), _lists(expected)
    if rows == right:
        return ""
    if len(rows) != len(right):
        return f"{len(rows)} rows, {baseline} has {len(right)}; {_describe(model, call)}"
    wrong = [
        index for index, pair in enumerate(zip(rows, right, strict=True)) if pair[0] != pair[1]
    ]
    row = wrong[0]
    prompts = _lists(call["input_ids"])
    # A prompt has several rows with `num_return_sequences`.
    prompt_row = row * len(prompts) // len(rows)
    prompt = prompts[prompt_row]
    mask = (
        _lists(call["attention_mask"])[prompt_row]
        if "attention_mask" in call
        else [1] * len(prompt)
    )
    words = _Words(tokenizer or call.get("tokenizer"))
    index = first_difference(right[row], rows[row])
    assert index is not None
    theirs, ours = (
        tokens[index] if index < len(tokens) else None for tokens in (right[row], rows[row])
    )
    unpadded = [token for token, kept in zip(prompt, mask, strict=True) if kept]
    prefix = unpadded + rows[row][len(prompt) : index] if index >= len(prompt) else []
    return "\n".join(
        [
            f"the output differs from {baseline} in {len(wrong)} of {len(rows)} rows",
            _describe(model, call),
            f"row {row}, prompt of {len(unpadded)} tokens: {words.sequence(unpadded)}",
            f"first difference at new token {index - len(prompt)} (position {index}): "
            f"{words.token(ours)}, {baseline} has {words.token(theirs)}",
            _judge(model, prefix, theirs, ours, words),
        ]
    )


class _Words:
    """Formatter of token ids, with their text if there is a tokenizer."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def token(self, token: int | None) -> str:
        if token is None:
            return "the end"
        return f"{token}" + (f" {self.tokenizer.decode([token])!r}" if self.tokenizer else "")

    def sequence(self, tokens: Sequence[int]) -> str:
        return f"{tokens}" + (f" {self.tokenizer.decode(tokens)!r}" if self.tokenizer else "")


def _lists(rows: Any) -> list[list[int]]:
    rows = getattr(rows, "sequences", rows)
    return rows.tolist() if isinstance(rows, Tensor) else list(map(list, rows))


def _describe(model: Any, call: Mapping[str, Any]) -> str:
    """Return the model, the strategy with its options, and the other arguments."""
    name = f" {model.name_or_path}" if model.name_or_path else ""
    lines = [f"model: {type(model).__name__}{name}, {model.dtype}"]
    strategy = call.get("spec_strategy")
    lines.append(f"strategy: {strategy if strategy is None else parse_strategy(strategy)}")
    assistant = call.get("assistant")
    if assistant is not None:
        path = isinstance(assistant, str) or hasattr(assistant, "__fspath__")
        lines.append(f"assistant: {assistant if path else type(assistant).__name__}")
    named = {"input_ids", "attention_mask", "spec_strategy", "assistant", "tokenizer"}
    lines.append(f"options: { {name: call[name] for name in call if name not in named} }")
    return "\n".join(lines)


@torch.no_grad()
def _judge(
    model: Any, prefix: list[int], expected: int | None, found: int | None, words: _Words
) -> str:
    """Describe the two largest logits after a prefix, and whether the two tokens are a tie."""
    if not prefix:
        return "the prompt itself differs"
    # Without padding, which is equivalent to the row's mask for every kind of positions.
    logits = model(torch.tensor([prefix], device=model.device)).logits[0, -1].float()
    best = logits.topk(2)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    largest = ", ".join(f"{words.token(token)}: {logit:.7g}" for token, logit in pairs)
    line = f"two largest logits of the target there, before logits processors: {largest}"
    if expected is None or found is None:
        return f"{line}\nnot a tie: one of the outputs ends"
    # Like `hf-spec verify` if only one forward pass is known.
    step = float(logits[logits.isfinite()].abs().max()) * torch.finfo(model.dtype).eps
    margin = float((logits[expected] - logits[found]).abs())
    kind, reason = mismatch._classify(margin, 0.0, 0.0, step)
    return f"{line}\n{'a tie' if kind == TIE else 'not a tie'} in {model.dtype}: {reason}"
