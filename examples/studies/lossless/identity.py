"""Compare every strategy with plain `generate()` token for token, on all prompts.

Run `python -m examples.studies.lossless.identity --help` for the options.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from examples.studies.models import load_model
from hf_spec import DraftConfig, GsdConfig, LookupConfig, TreeConfig
from hf_spec.cli.options import ENTRY
from hf_spec.common.machine import environment
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.evaluation.bench.contenders import Contender, plain, strategy
from hf_spec.evaluation.lossless.mismatch import first_difference
from hf_spec.methods.draft_model.truncated import truncated_draft
from hf_spec.methods.entries import parse_entry


def compare(
    reference: Contender,
    contenders: Sequence[Contender],
    prompts: Sequence[Prompt],
    tokenizer: Any,
    new_tokens: int,
) -> list[dict[str, Any]]:
    """Answer every prompt with every contender, and compare with the reference.

    Returns:
        One row per prompt and contender: identity, the first differing position, and tau.
    """
    rows = []
    for prompt in tqdm(prompts, desc="prompts", disable=None):
        ids = prompt.encode(tokenizer)
        expected = reference.run(ids, new_tokens).sequence.tolist()
        for contender in contenders:
            run = contender.run(ids, new_tokens)
            got = run.sequence.tolist()
            differs = first_difference(expected, got)
            rows.append(
                {
                    "prompt": prompt.id,
                    "task": prompt.task,
                    "contender": contender.name,
                    "identical": differs is None,
                    "first_difference": differs,
                    "new_tokens": len(got) - ids.shape[1],
                    "tau": run.stats.tau if run.stats else None,
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return 0 only if every output is identical."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--per-task", type=int, help="prompts of each task; all by default")
    parser.add_argument(
        "--strategy",
        action="append",
        type=parse_entry,
        help=f"{ENTRY}, once or more; by default lookup, and draft, tree and gsd with the model's "
        "own first layers",
    )
    parser.add_argument("--draft-layers", type=int, default=4, help="layers of that draft model")
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    if options.strategy:
        contenders = [strategy(model, config, given, n) for n, config, given in options.strategy]
    else:
        draft = truncated_draft(model, options.draft_layers)
        configs = (DraftConfig(), TreeConfig(), GsdConfig())
        contenders = [strategy(model, LookupConfig())]
        contenders += [strategy(model, config, draft) for config in configs]
    prompts = load_prompts(per_task=options.per_task)
    rows = compare(plain(model), contenders, prompts, tokenizer, options.new_tokens)
    for contender in contenders:
        mine = [row for row in rows if row["contender"] == contender.name]
        same = sum(row["identical"] for row in mine)
        tau = sum(row["tau"] for row in mine) / len(mine)
        print(f"{contender.name}: {same} of {len(mine)} identical, mean tau {tau:.2f}")
    if options.out:
        facts = {"environment": environment(), "new_tokens": options.new_tokens, "dtype": "float32"}
        options.out.write_text(json.dumps({**facts, "rows": rows}, indent=1))
    return 0 if all(row["identical"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
