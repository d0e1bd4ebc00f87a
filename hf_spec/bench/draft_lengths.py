"""Speed of DISCO against every other way to choose the draft length, with one draft model.

The rows of table 1 of Mamou et al. 2024 (arXiv 2405.04304): the target alone, the heuristic,
static lengths of five and of the calibrated optimum, DISCO, the oracle; and the confidence rule of
transformers. Run as `python -m hf_spec.bench.draft_lengths --help` says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.bench.contenders import Contender, plain, strategy
from hf_spec.bench.oracle import oracle
from hf_spec.bench.prompts import load_prompts
from hf_spec.bench.report import markdown, summary
from hf_spec.bench.runner import measure, to_json
from hf_spec.models.disco_classifier import METHOD
from hf_spec.strategies.base import StrategyConfig
from hf_spec.strategies.disco import DiscoConfig, find_draft_model
from hf_spec.strategies.draft_model import DraftConfig
from hf_spec.strategies.none import NoneConfig


def length_contenders(
    model: PreTrainedModel, adapter: SpecAdapter, draft: PreTrainedModel | None = None
) -> list[Contender]:
    """Every way to choose the length, plain `generate()` first.

    Args:
        model: the target.
        adapter: of DISCO, loaded from a folder; if calibrated, it names the best static length.
        draft: the draft model; the one that the adapter names by default.
    """
    draft = draft or find_draft_model(adapter, model)
    ways: dict[str, StrategyConfig] = {
        "heuristic": DraftConfig(length_policy="heuristic"),
        "confidence": DraftConfig(length_policy="confidence", max_draft_tokens=20),
        "static 5": DraftConfig(max_draft_tokens=5),
    }
    best = adapter.options.get("calibration", {}).get("best_static")
    if best is not None:
        length = int(best.split()[-1])
        ways[f"static {length}, the best on validation"] = DraftConfig(max_draft_tokens=length)
    ways["disco"] = DiscoConfig(adapter=str(adapter.folder))
    return [
        plain(model),
        strategy(model, NoneConfig(), name="engine without drafts"),
        *(strategy(model, config, draft, name) for name, config in ways.items()),
        oracle(model, draft),
    ]


def main(argv: list[str] | None = None) -> None:
    """Command line; prints Markdown tables and writes every record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--adapter", required=True, help="folder of a DISCO adapter")
    parser.add_argument("--prompts", type=Path, help="JSON lines; the package's 60 by default")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    adapter = load_adapter(options.adapter, METHOD)
    contenders = length_contenders(model, adapter)
    prompts = load_prompts(options.prompts, options.per_task)
    with tqdm(total=len(contenders) * len(prompts) * options.repeats, disable=None) as bar:
        records = measure(
            contenders, prompts, tokenizer, options.new_tokens, options.repeats, bar.update
        )
    print(markdown(records))  # noqa: T201 - the command's result
    if options.out:
        arguments = " ".join(argv if argv is not None else sys.argv[1:])
        facts = {
            "command": f"python -m hf_spec.bench.draft_lengths {arguments}",
            "summary": summary(records),
            "calibration": adapter.options.get("calibration"),
        }
        options.out.write_text(json.dumps(to_json(records, **facts), indent=1))


if __name__ == "__main__":
    main()
