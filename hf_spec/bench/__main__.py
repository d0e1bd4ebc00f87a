"""Speed of the strategies that need no training, against plain generate and other lookups.

Run as `python -m hf_spec.bench --help` says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.bench import contenders as ways
from hf_spec.bench.prompts import load_prompts
from hf_spec.bench.report import markdown, summary
from hf_spec.bench.runner import measure, to_json
from hf_spec.strategies import LookupConfig


def main(argv: list[str] | None = None) -> None:
    """Command line; prints Markdown tables and writes every record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines; the package's 60 by default")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--match-length", type=int, default=2, help="n-gram length of every lookup")
    parser.add_argument("--copy-length", type=int, default=10, help="tokens that a match copies")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    lookup = (model, options.match_length, options.copy_length)
    same = LookupConfig(
        match_length=options.match_length,
        copy_length=options.copy_length,
        max_matches=1,
        max_draft_tokens=options.copy_length,
    )
    found = [
        ways.plain(model),
        ways.transformers_lookup(*lookup),
        ways.economize_lookup(*lookup),
        ways.strategy(model, same, name="hf_spec lookup, one match"),
        ways.strategy(model, LookupConfig(), name="hf_spec lookup"),
    ]
    contenders = [contender for contender in found if contender is not None]
    prompts = load_prompts(options.prompts, options.per_task)
    with tqdm(total=len(contenders) * len(prompts) * options.repeats, disable=None) as bar:
        records = measure(
            contenders, prompts, tokenizer, options.new_tokens, options.repeats, bar.update
        )
    print(markdown(records))  # noqa: T201 - the command's result
    if options.out:
        command = "python -m hf_spec.bench " + " ".join(argv if argv is not None else sys.argv[1:])
        facts = {"command": command, "summary": summary(records)}
        options.out.write_text(json.dumps(to_json(records, **facts), indent=1))


if __name__ == "__main__":
    main()
