"""Batch study: every contender runs every batch, with equal outputs and correct counts."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from examples.studies.ems_sd import batches
from examples.studies.ems_sd.batch_report import markdown, summary
from examples.studies.ems_sd.batches import (
    BATCH_SIZES,
    CAPS,
    CONTENDERS,
    DRAFT,
    LEFT,
    LOOKUP,
    Extent,
    Method,
    time_batches,
)
from hf_spec.common.prompts import Prompt
from tests.tiny_models import draft_model


def test_the_settings_are_those_of_the_paper() -> None:
    assert list(BATCH_SIZES) == [1, 2, 4, 8, 16, 24]
    assert (LOOKUP.match_length, LOOKUP.min_match_length, LOOKUP.copy_length) == (2, 2, 7)
    assert LOOKUP.max_matches == 1
    assert DRAFT.max_draft_tokens == 4
    assert DRAFT.max_draft_tokens + 1 == CAPS["draft"]
    assert batches.TREE.max_draft_tokens + 1 == CAPS["tree"]
    assert LOOKUP.copy_length + 1 == CAPS["lookup"]


def run(model: Any, tokenizer: Any, prompts: list[Prompt], *methods: Method) -> list[Any]:
    extent = Extent(batch_sizes=(1, 3), num_batches=1, new_tokens=10, repeats=2)
    found = list(time_batches(model, tokenizer, methods, prompts, extent))
    assert sum(map(len, found)) == extent.num_runs(methods)
    return [record for records in found for record in records]


@pytest.mark.full
def test_every_contender_meets_every_batch(
    model: Any, tokenizer: Any, prompts: list[Prompt]
) -> None:
    records = run(
        model,
        tokenizer,
        prompts,
        Method("lookup", LOOKUP),
        Method("draft", DRAFT, draft_model("llama")),
    )
    runs = {(r.method, r.batch_size, r.contender, r.repeat) for r in records}
    assert len(runs) == len(records) == 2 * 2 * len(CONTENDERS) * 2
    assert all(record.identical for record in records)
    assert all(record.seconds > 0 for record in records)
    for record in records:
        (plain,) = (
            r
            for r in records
            if (r.method, r.batch_size, r.repeat)
            == (record.method, record.batch_size, record.repeat)
            and r.contender == "plain"
        )
        assert record.plain_seconds == plain.seconds
        assert record.plain_prompt_seconds == plain.prompt_seconds
        assert record.prompt_seconds > 0
        assert record.new_tokens == 10 * record.batch_size


def test_prompts_of_one_length_are_not_padded(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt(text, "text", (text,)) for text in ("one two three one two", "a b c", "a")]
    lengths = sorted(prompt.encode(tokenizer).shape[1] for prompt in prompts)
    extent = Extent((2,), 1, 6, 1, prompt_tokens=lengths[1])
    (records,) = time_batches(model, tokenizer, [Method("lookup", LOOKUP)], prompts, extent)
    assert {record.prompt_tokens for record in records} == {2 * lengths[1]}
    with pytest.raises(SystemExit, match="no prompt has 900 tokens"):
        next(time_batches(model, tokenizer, [], prompts, Extent(prompt_tokens=900)))


def test_tokens_run_are_those_that_enter_a_linear_layer(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt(text, "text", (text,)) for text in ("one two three one two", "a")]
    counts: list[int] = []

    def count(_: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        counts.append(args[0].shape[:-1].numel())

    handle = model.model.layers[0].mlp.up_proj.register_forward_pre_hook(count)
    try:
        records = run(model, tokenizer, prompts, Method("lookup", LOOKUP))
    finally:
        handle.remove()
    by_name = {r.contender: r for r in records if (r.batch_size, r.repeat) == (3, 0)}
    # Plain `generate()` runs the padded prompts, then one token per row until the last row ends.
    width = max(prompt.encode(tokenizer).shape[1] for prompt in prompts)
    assert by_name["plain"].linear_tokens == 3 * (width + 9)
    assert by_name["plain"].prompt_tokens == 3 * width
    run_by_us = {name: r.linear_tokens for name, r in by_name.items() if name != "plain"}
    assert run_by_us["unpadded"] == run_by_us["unpadded_input"]
    assert run_by_us["padded"] == run_by_us["unpadded_kv"]
    assert run_by_us["padded"] - by_name["padded"].padding_tokens == run_by_us["unpadded"]
    assert by_name["padded"].padding_tokens > 0
    # The warm-up of every contender runs first and is not recorded.
    recorded = sum(record.linear_tokens + record.prompt_tokens for record in records)
    assert recorded in {sum(counts[start:]) for start in range(len(counts))}


def test_prompts_are_dealt_out_and_padded_on_the_left() -> None:
    batch = batches.left_padded([torch.tensor([5, 6, 7]), torch.tensor([8])])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [0, 0, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_the_command_writes_records_tables_and_a_plot(
    folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, image = tmp_path / "batches.json", tmp_path / "batches.png"
    command = f"--model {folder} --assistant {folder} --prompts {prompt_file} --batch-sizes 1 2"
    command += " --batches 1 --new-tokens 6 --repeats 1 --cpu-packing off"
    command += " --methods lookup tree"
    batches.main([*command.split(), "--out", str(out), "--plot", str(image)])
    printed = capsys.readouterr().out
    assert "### lookup" in printed
    assert "### tree" in printed
    content = json.loads(out.read_text())
    assert len(content["records"]) == 2 * 2 * len(CONTENDERS)
    assert [(row["method"], row["batch_size"]) for row in content["summary"]] == [
        ("lookup", 1),
        ("lookup", 2),
        ("tree", 1),
        ("tree", 2),
    ]
    assert "--batch-sizes 1 2" in content["command"]
    assert content["environment"]["torch"] == torch.__version__
    assert image.read_bytes().startswith(b"\x89PNG")


def test_more_padding_on_the_left_is_plains_own_matter(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt(text, "text", (text,)) for text in ("one two three one two", "a b c")]
    extent = Extent((2,), 1, 6, 1, left_padding=5)
    method = Method("lookup", LOOKUP)
    (records,) = time_batches(model, tokenizer, [method], prompts, extent)
    assert [record.contender for record in records] == [*CONTENDERS, LEFT]
    assert len(records) == extent.num_runs([method])
    plain, left = records[0], records[-1]
    assert left.identical
    # Five more positions in each of the two rows, then one token per row and step.
    assert left.prompt_tokens == plain.prompt_tokens + 10
    assert left.linear_tokens == plain.linear_tokens + 10
    assert "plain after more padding" in markdown(summary([asdict(r) for r in records], CAPS))


def test_a_stopped_command_goes_on(
    folder: Path, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batches.json"
    command = f"--model {folder} --prompts {prompt_file} --batch-sizes 1 2 --batches 2"
    command += f" --new-tokens 6 --repeats 2 --out {out}"
    batches.main([*command.split(), "--seconds", "0.0001"])
    first = json.loads(out.read_text())["records"]
    assert len(first) == len(CONTENDERS)
    batches.main(command.split())
    found = json.loads(out.read_text())["records"]
    assert found[: len(first)] == first
    runs = {(r["batch_size"], r["batch"], r["repeat"], r["contender"]) for r in found}
    assert len(runs) == len(found) == 2 * 2 * 2 * len(CONTENDERS)
    # All batches run once before any is repeated.
    assert [r["repeat"] for r in found] == sorted(r["repeat"] for r in found)
    with pytest.raises(SystemExit, match="is of other batches"):
        batches.main([*command.split(), "--prompt-tokens", "3"])
    with pytest.raises(SystemExit, match="with another clock"):
        batches.main([*command.split(), "--processor-time"])
    with pytest.raises(SystemExit, match="has other lookups"):
        batches.main([*command.split(), "--prompt-only"])


def test_the_clock_is_the_one_that_is_given(model: Any, tokenizer: Any) -> None:
    prompts = [Prompt("a", "text", ("one two three one two",))]
    ticks = iter(range(10_000))
    method = Method("lookup", LOOKUP)
    (records,) = time_batches(
        model, tokenizer, [method], prompts, Extent((1,), 1, 6, 1), clock=lambda: next(ticks)
    )
    assert {record.seconds for record in records} == {1}
    assert {record.prompt_seconds for record in records} == {1}
