"""Cost of a draft level over a reduced draft vocabulary, compared with the full vocabulary.

The trained draft model has a vocabulary of 8,192 of 49,152 tokens; all others have probability 0.
Logits processors, softmax, sampling, top-k and DISCO features run over the reduced vocabulary. Here
the same weights also draft with a head that does not declare a reduced vocabulary, interleaved and
with the same seed. Greedy drafts are identical token by token. Sampled drafts have the same
distributions but use different random numbers. For usage, run
`python -m examples.studies.disco.few_tokens --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedModel

from examples.studies.timing import add_options, begin, write_record
from hf_spec import DiscoConfig, DraftConfig, GsdConfig, TreeConfig
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table
from hf_spec.drafting.config import StrategyConfig
from hf_spec.methods.draft_model.loading import resolve_draft_model

SAMPLED = {"do_sample": True, "temperature": 0.7, "top_p": 0.9}
GREEDY = {"do_sample": False}
HEADS = ("few", "all")


class AmongAll(nn.Module):
    """Head with a logit for every token that does not declare its reduced vocabulary."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., V) logits of (..., hidden size) states."""
        logits: Tensor = self.head(hidden)
        return logits


def ways(classifier: str | None) -> dict[str, tuple[StrategyConfig, Mapping[str, Any]]]:
    """Return name -> strategy with a fixed draft length, and sampling settings of the target."""
    found: dict[str, tuple[StrategyConfig, Mapping[str, Any]]] = {
        "draft": (DraftConfig(max_draft_tokens=4), GREEDY),
        "tree": (TreeConfig(max_draft_tokens=4, max_nodes=15), GREEDY),
        "gsd": (GsdConfig(max_draft_tokens=4, max_nodes=15), GREEDY),
        "draft, sampled": (DraftConfig(max_draft_tokens=4), SAMPLED),
        "tree, sampled": (TreeConfig(max_draft_tokens=4, max_nodes=15), SAMPLED),
    }
    if classifier is not None:
        disco = DiscoConfig(adapter=classifier, max_draft_tokens=4, acceptance_threshold=0.3)
        found["disco"] = disco, GREEDY
        found["disco, sampled"] = disco, SAMPLED
    return found


def measure(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    texts: Sequence[Tensor],
    chosen: Mapping[str, tuple[StrategyConfig, Mapping[str, Any]]],
    new_tokens: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield, per text, a record per way and head: drafting seconds, draft levels, and answer.

    Before the first text, every way runs once without timing.
    """
    known = draft.get_output_embeddings()
    heads = dict(zip(HEADS, (known, AmongAll(known)), strict=True))
    answer = partial(_answered, model, draft, new_tokens)
    try:
        for head in heads.values():
            draft.set_output_embeddings(head)
            for way in chosen.values():
                answer(texts[0], *way)
        for index, text in enumerate(texts):
            records = []
            # Alternate the order, because the second run benefits from the warm-up by the first.
            for name, which in product(chosen, HEADS if index % 2 else HEADS[::-1]):
                draft.set_output_embeddings(heads[which])
                found = answer(text, *chosen[name])
                records.append({"text": index, "way": name, "head": which, **found})
            yield records
    finally:
        draft.set_output_embeddings(known)


def _answered(
    model: Any,
    draft: PreTrainedModel,
    new_tokens: int,
    text: Tensor,
    config: StrategyConfig,
    choosing: Mapping[str, Any],
) -> dict[str, Any]:
    torch.manual_seed(0)
    output = model.generate(
        text,
        max_new_tokens=new_tokens,
        spec_strategy=config,
        assistant=draft,
        return_dict_in_generate=True,
        **choosing,
    )
    stats = output.spec_stats
    return {
        "draft_seconds": stats.draft_seconds,
        "draft_forwards": stats.draft_forwards,
        "drafted": stats.drafted_tokens,
        "tokens": output.sequences[0, text.shape[1] :].tolist(),
    }


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return per way the milliseconds of a draft forward pass (median) and identical drafts."""
    rows = []
    for name in dict.fromkeys(record["way"] for record in records):
        by_head: dict[str, list[Mapping[str, Any]]] = {
            head: [r for r in records if (r["way"], r["head"]) == (name, head)] for head in HEADS
        }
        cost = {
            head: [1e3 * r["draft_seconds"] / r["draft_forwards"] for r in found]
            for head, found in by_head.items()
        }
        pairs = list(zip(*by_head.values(), strict=True))
        facts = ("tokens", "drafted", "draft_forwards")
        rows.append(
            {
                "way": name,
                "texts": len(pairs),
                **{f"{head}_ms": median(found) for head, found in cost.items()},
                "saved": median(1 - few / every for few, every in zip(*cost.values(), strict=True)),
                "same": sum(all(few[n] == every[n] for n in facts) for few, every in pairs),
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary as a Markdown table."""
    columns = {
        "drafts": lambda row: row["way"],
        "ms a level, all tokens": lambda row: f"{row['all_ms']:.2f}",
        "known tokens": lambda row: f"{row['few_ms']:.2f}",
        "saved": lambda row: f"{row['saved']:.0%}",
        "same answer and number of drafts": lambda row: f"{row['same']} of {row['texts']}",
    }
    return Table.of(columns, rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--assistant", required=True, help="folder or Hub id of a trained draft")
    parser.add_argument("--classifier", help="folder or Hub id of a DISCO adapter")
    parser.add_argument("--per-task", type=int, default=1, help="prompts of each task")
    parser.add_argument("--new-tokens", type=int, default=32)
    options = parser.parse_args(argv)
    model, _ = begin(options)
    draft = resolve_draft_model("draft", options.assistant, model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    texts = [prompt.encode(tokenizer) for prompt in load_prompts(per_task=options.per_task)]
    records: list[dict[str, Any]] = []
    for found in measure(model, draft, texts, ways(options.classifier), options.new_tokens):
        records += found
        write_record(options, {"summary": summary(records), "records": records})
    print(table(summary(records)))


if __name__ == "__main__":
    main()
