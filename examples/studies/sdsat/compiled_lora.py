"""Measure the time that compiled layers with the gated LoRA of adaptive tokens save.

Run as `python -m examples.studies.sdsat.compiled_lora --model MODEL --adapter ADAPTER`.
Interleaved: plain `generate()`, `none`, `sdsat` with uncompiled layers in steps with adaptive
tokens, and unmodified `sdsat`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from statistics import median, quantiles
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import hf_spec
from examples.studies import timing
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table
from hf_spec.engine.fast.compiled_layers import CompiledLayer

PLAIN, NONE, OUTSIDE = "plain", "none", "sdsat, LoRA outside of compiled layers"


@contextmanager
def lora_outside() -> Iterator[None]:
    """Run layers uncompiled in steps with adaptive tokens."""
    compiled = CompiledLayer.__call__

    def call(self: CompiledLayer, *args: Any, spec_step: Any = None, **kwargs: Any) -> Any:
        if spec_step is not None and spec_step.gate is not None:
            return self._run_uncompiled(args, kwargs, spec_step)
        return compiled(self, *args, spec_step=spec_step, **kwargs)

    with patch.object(CompiledLayer, "__call__", call):
        yield


def run(model: PreTrainedModel, name: str, given: Mapping[str, Any], adapter: str) -> Any:
    """Return the output of the contender of this name."""
    options: dict[str, Any] = {"spec_strategy": "none"} if name == NONE else {}
    if name.startswith("sdsat"):
        length = int(name.rpartition("=")[2]) if "=" in name else None
        config = hf_spec.SdsatConfig(num_adaptive=length)
        options = {"spec_strategy": config, "assistant": adapter}
    with lora_outside() if name == OUTSIDE else nullcontext():
        return model.generate(**given, **options)


def record(
    model: PreTrainedModel,
    prompts: Mapping[str, Tensor],
    names: Sequence[str],
    options: Any,
    clock: Callable[[], float],
) -> list[dict[str, Any]]:
    """Time all contenders on every prompt, interleaved; one entry per prompt and contender."""
    rows = []
    for prompt, ids in prompts.items():
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "do_sample": False}
        given |= {"max_new_tokens": options.new_tokens, "return_dict_in_generate": True}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        outputs: dict[str, Any] = {}
        for _ in range(options.repeats):
            for name in names:
                start = clock()
                outputs[name] = run(model, name, given, options.adapter)
                seconds[name].append(clock() - start)
        for name, output in outputs.items():
            stats = getattr(output, "spec_stats", None)
            rows.append(
                {
                    "prompt": prompt,
                    "contender": name,
                    "seconds": seconds[name],
                    "new_tokens": output.sequences.shape[1] - ids.shape[1],
                    "target_forwards": stats and stats.target_forwards,
                    "tau": stats and stats.tau,
                    "identical": torch.equal(output.sequences, outputs[PLAIN].sequences),
                }
            )
    return rows


def summary(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    """Return tokens per second and ratios of one contender, by the median time of each prompt."""
    own = [row for row in rows if row["contender"] == name]

    def ratios(other: str) -> list[float]:
        others = [row for row in rows if row["contender"] == other]
        pairs = zip(others, own, strict=True)
        return [median(a["seconds"]) / median(b["seconds"]) for a, b in pairs]

    fifths = quantiles(ratios(NONE), n=5) if len(own) > 1 else ratios(NONE) * 4
    forwards = [row["target_forwards"] for row in own if row["target_forwards"]]
    tokens = sum(row["new_tokens"] for row in own)
    return {
        "tokens_per_second": tokens / sum(median(row["seconds"]) for row in own),
        "over_plain": median(ratios(PLAIN)),
        "over_none": [median(ratios(NONE)), fifths[0], fifths[-1]],
        "tokens_per_forward": tokens / sum(forwards) if forwards else 1.0,
        "identical": f"{sum(row['identical'] for row in own)} of {len(own)}",
    }


def table(summaries: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of the study."""
    head = ["", "tokens/s", "over plain", "over `none` (p20 - p80)", "tokens per forward"]
    lines = []
    for name, one in summaries.items():
        middle, low, high = one["over_none"]
        cells = [f"{one['tokens_per_second']:.1f}", f"{one['over_plain']:.2f}x"]
        cells += [f"{middle:.2f}x ({low:.2f} - {high:.2f})", f"{one['tokens_per_forward']:.2f}"]
        lines.append([name, *cells, one["identical"]])
    return Table([*head, "identical"], lines)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--adapter", required=True, help="folder of a gated SDSAT adapter")
    parser.add_argument("--num-adaptive", type=int, nargs="*", default=[], help="further lengths")
    parser.add_argument("--per-task", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    prompts = {p.id: p.encode(tokenizer) for p in load_prompts(per_task=options.per_task)}
    names = [PLAIN, NONE, OUTSIDE, "sdsat", *(f"sdsat k={k}" for k in options.num_adaptive)]
    hf_spec.compile(model)
    # The first calls compile.
    first = dict([next(iter(prompts.items()))])
    record(model, first, names, argparse.Namespace(**{**vars(options), "repeats": 1}), clock)
    rows = record(model, prompts, names, options, clock)
    summaries = {name: summary(rows, name) for name in names}
    print(table(summaries).markdown())
    timing.write_record(options, {"summary": summaries, "rows": rows})


if __name__ == "__main__":
    main()
