"""Record the proposals of a draft model at every position of the target's greedy answers.

Run `python -m examples.studies.length_policies.traces --help` for the options. A greedy draft is
accepted as long as its tokens equal those of the answer. So one proposal per position, made after
the answer's own prefix, is enough to replay any draft length later. Nothing is timed here. The
record is written after every prompt, and the same command resumes it.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from examples.studies.models import load_model
from hf_spec import TreeConfig
from hf_spec.common.files import atomic_write
from hf_spec.common.prompts import load_prompts
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.generation.one_call import generate_with
from hf_spec.methods.draft_model.truncated import PREFIX, truncated_draft
from hf_spec.methods.registry import make_drafter

# Number of recorded tokens per position, most probable first.
RANKS = 3
# Probabilities are stored as integers, in units of 1 / SCALE.
SCALE = 1000


class Recorder(Drafter):
    """Drafter that sends nothing, and records the next tokens proposed by each of `drafters`."""

    def __init__(self, drafters: Mapping[str, Drafter]):
        self.drafters = drafters
        self.proposals: dict[str, list[list[int]]] = {name: [] for name in drafters}

    def start(self, state: GenerationState) -> None:
        """Start every drafter."""
        self._active = [drafter.active(state) for drafter in self.drafters.values()]

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        """Return the root of the only row."""
        self._trees = {}
        for name, drafter in self.drafters.items():
            with drafter.active(state):
                tree = self._trees[name] = drafter.draft(state, {0: 1})
            chances = tree.node_probs or [1.0] * tree.num_nodes
            ranked = [
                (tree.tokens[node], round(SCALE * chances[node])) for node in tree.nodes(0)[1:]
            ]
            self.proposals[name].append([number for pair in ranked for number in pair])
        return DraftTree.from_drafts({0: ([state.tokens[0][-1]], [-1])}, 1)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Report that no proposal was verified."""
        for name, drafter in self.drafters.items():
            drafter.observe(Verdict(self._trees[name], [[]], verdict.bonus), output)


def record(model: Any, assistants: Mapping[str, Any], ids: torch.Tensor, length: int) -> Any:
    """Return the answer to (1, L) ids and the proposals of every assistant, by name."""
    config = TreeConfig(
        max_draft_tokens=1, children=RANKS, expanded_per_level=RANKS, max_nodes=RANKS
    )
    recorder = Recorder({name: make_drafter(config, model, a) for name, a in assistants.items()})
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        custom_generate=partial(generate_with, recorder),
    )
    return output[0, ids.shape[1] :].tolist(), recorder.proposals


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--assistant", action="append", required=True, metavar="NAME=ASSISTANT")
    parser.add_argument("--prompts", type=Path, help="JSON lines; default: the package's 60")
    parser.add_argument("--per-task", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, required=True, help="gzipped JSON")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    model, tokenizer = load_model(options.model, dtype)
    assistants: dict[str, Any] = dict(entry.split("=", 1) for entry in options.assistant)
    for name, source in assistants.items():
        if source.startswith(PREFIX):
            assistants[name] = truncated_draft(model, int(source.removeprefix(PREFIX)))
        elif (Path(source) / "config.json").exists():
            assistants[name] = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
    records: list[dict[str, Any]] = []
    if options.out.exists():
        records = json.loads(gzip.decompress(options.out.read_bytes()))["answers"]
    done = {entry["id"] for entry in records}
    for prompt in load_prompts(options.prompts, options.per_task):
        if prompt.id in done:
            continue
        ids = prompt.encode(tokenizer)
        answer, proposals = record(model, assistants, ids, options.max_new_tokens)
        records.append(
            {
                "id": prompt.id,
                "task": prompt.task,
                "prompt": ids[0].tolist(),
                "answer": answer,
                "proposals": proposals,
            }
        )
        content = {"model": Path(options.model).name, "answers": records}
        text = json.dumps(content, separators=(",", ":")).encode()
        with atomic_write(options.out) as file:
            file.write_bytes(gzip.compress(text, mtime=0))
        hits = {
            name: sum(p[:1] == [t] for p, t in zip(found, answer, strict=True)) / len(answer)
            for name, found in proposals.items()
        }
        print(prompt.id, len(answer), {name: round(share, 2) for name, share in hits.items()})


if __name__ == "__main__":
    main()
