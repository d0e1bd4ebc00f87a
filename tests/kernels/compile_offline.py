"""Compile kernels for a GPU that need not be installed, from the launchers' own arguments.

Script for `test_compiles`: it prints one line of JSON per kernel, a `Compiled` with its case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import torch
from hf_spec_kernels import DistillWeights, Moves, Scoring
from hf_spec_kernels.configs import config_file
from hf_spec_kernels.distill_loss.kernel import distill_loss
from hf_spec_kernels.draft_features.kernel import draft_features
from hf_spec_kernels.filter_scores.kernel import filter_scores
from hf_spec_kernels.kv_keep.kernel import kv_keep
from hf_spec_kernels.kv_write.kernel import kv_write
from hf_spec_kernels.verify_tree.kernel import verify_tree

from examples.studies.kernels import compile_table
from examples.studies.kernels.compile_table import zeros
from examples.studies.kernels.offline import compiling

DTYPES = {"16bit": torch.bfloat16, "32bit": torch.float32}
EVERYTHING = Scoring(0.1, 9, 5.0, torch.zeros(8), torch.zeros(8))
# Numbers of nodes that make few, some or many rows with four heads each.
NODES = {"few": 4, "some": 40, "many": 300}


def attend(head: int, nodes: int, dtype: torch.dtype, scoring: Scoring, num_splits: int) -> None:
    query = zeros(nodes, 8, head, dtype=dtype)
    compile_table.attend(query, zeros(2, 2, 64, head, dtype=dtype), scoring, 48, num_splits)


def keep(dtype: torch.dtype, head: int) -> None:
    pool = zeros(2, 2, 64, head, dtype=dtype)
    kv_keep([pool, pool], Moves(zeros(1), zeros(1), zeros(3), zeros(2), 3))


def write() -> None:
    states, pool = zeros(7, 2, 80, dtype=torch.bfloat16), zeros(2, 2, 64, 80, dtype=torch.bfloat16)
    kv_write(states, states, pool, pool, zeros(2, 7))


def over_the_vocabulary() -> None:
    logits = zeros(5, 50_000, dtype=torch.bfloat16)
    nodes = zeros(5, dtype=torch.long)
    for uniforms, draft in ((None, None), (torch.zeros(5), None), (torch.zeros(5, 2), logits)):
        probs = None if draft is None else draft.float()
        verify_tree(logits, nodes, nodes, nodes[:3], 4, uniforms, probs)
    filter_scores(logits, torch.ones(5, 4))
    draft_features(logits.float(), 10)
    distill_loss(logits.requires_grad_(), logits.detach(), nodes, DistillWeights()).backward()


def every_kernel() -> dict[str, Callable[[], None]]:
    """Return at least one case of every kernel, and two regression cases of tree attention."""
    return {
        "all that scores": lambda: attend(80, 4, torch.float16, EVERYTHING, 4),
        "head128_16bit_many": lambda: attend(128, 300, torch.bfloat16, Scoring(), 1),
        "head64_32bit_few": lambda: attend(64, 4, torch.float32, Scoring(), 1),
        "write": write,
        "keep": lambda: keep(torch.bfloat16, 64),
        "vocabulary": over_the_vocabulary,
    }


def every_config() -> dict[str, Callable[[], None]]:
    """Return tree attention with every default tile size, with and without all scoring options."""
    cases = {}
    for key in json.loads(config_file("ragged_tree_attention", "default").read_text()):
        head, bits, rows = key.removeprefix("head").split("_")
        for name, scoring in (("", Scoring()), (" all", EVERYTHING)):
            # Prompts fill a GPU without splits.
            for num_splits in (1,) if rows == "many" else (1, 4):
                given = (int(head), NODES[rows], DTYPES[bits], scoring, num_splits)
                cases[f"{key}{name}, {num_splits} splits"] = lambda given=given: attend(*given)
    return cases


def products_of_float32() -> dict[str, Callable[[], None]]:
    """Return a case with float32 matmuls, which some GPUs round if allowed to."""
    return {"head128_32bit_many": every_config()["head128_32bit_many, 1 splits"]}


CASES = {"kernels": every_kernel, "configs": every_config, "float32": products_of_float32}


def main(target: str, which: str) -> None:
    for case, compile_it in CASES[which]().items():
        with compiling(target) as launches:
            compile_it()
        for compiled in launches:
            print(json.dumps({"case": case, **asdict(compiled)}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(*sys.argv[1:])
