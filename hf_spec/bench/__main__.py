"""Speed of strategies against plain generate; by default of the lookups of this and other packages.

Run as `python -m hf_spec.bench --help` says.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec.bench import contenders as ways
from hf_spec.bench.oracle import oracle
from hf_spec.bench.prompts import load_prompts
from hf_spec.bench.report import markdown, summary
from hf_spec.bench.runner import Record, measure, to_json
from hf_spec.files import written_whole
from hf_spec.models.assistant import resolve_draft_model
from hf_spec.strategies import LookupConfig


def main(argv: list[str] | None = None) -> None:
    """Command line; prints Markdown tables and writes every record as JSON, prompt by prompt."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--prompts", type=Path, help="JSON lines; the package's 60 by default")
    parser.add_argument("--per-task", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--match-length", type=int, default=2, help="n-gram length of every lookup")
    parser.add_argument("--copy-length", type=int, default=10, help="tokens that a match copies")
    parser.add_argument(
        "--strategy",
        action="append",
        type=ways.parse_entry,
        help=f"{ways.ENTRY}, given once or more: these instead of the lookups",
    )
    parser.add_argument("--oracle", help="an assistant: chains of it that end where they must")
    parser.add_argument("--out", type=Path, help="JSON file; whole after every prompt")
    options = parser.parse_args(argv)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    found = (
        [ways.strategy(model, config, assistant, name) for name, config, assistant in entries]
        if (entries := options.strategy)
        else _lookups(model, options.match_length, options.copy_length)
    )
    contenders = [ways.plain(model), *(contender for contender in found if contender is not None)]
    if options.oracle:
        draft = resolve_draft_model("oracle", options.oracle, model)
        contenders.append(oracle(model, draft))
    prompts = load_prompts(options.prompts, options.per_task)
    command = "python -m hf_spec.bench " + " ".join(argv if argv is not None else sys.argv[1:])
    records: list[Record] = []
    with tqdm(total=len(contenders) * len(prompts) * options.repeats, disable=None) as bar:
        for newest in measure(
            contenders, prompts, tokenizer, options.new_tokens, options.repeats, bar.update
        ):
            records += newest
            if options.out:
                _write(options.out, records, command)
    print(markdown(records))  # noqa: T201 - the command's result


def _write(path: Path, records: Sequence[Record], command: str) -> None:
    facts = {"command": command, "summary": summary(records)}
    with written_whole(path) as part:
        part.write_text(json.dumps(to_json(records, **facts), indent=1), encoding="utf-8")


def _lookups(
    model: PreTrainedModel, match_length: int, copy_length: int
) -> list[ways.Contender | None]:
    """Ours with defaults and with the settings of the others, transformers' and economize's."""
    same = LookupConfig(
        match_length=match_length,
        copy_length=copy_length,
        max_matches=1,
        max_draft_tokens=copy_length,
    )
    return [
        ways.transformers_lookup(model, match_length, copy_length),
        ways.economize_lookup(model, match_length, copy_length),
        ways.strategy(model, same, name="hf_spec lookup, one match"),
        ways.strategy(model, LookupConfig(), name="hf_spec lookup"),
    ]


if __name__ == "__main__":
    main()
