"""Measure the peak memory of plain `generate()` and of strategies, each in a separate process.

    python -m examples.studies.peers.peak_memory --model MODEL --dtype bfloat16 --strategy none \
        --strategy gsd:assistant_bits=4@DRAFT

The peak is that of the whole process, including loading.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from transformers import AutoTokenizer

from examples.studies import timing
from examples.studies.full_table import by_prompt
from hf_spec.common.prompts import load_prompts
from hf_spec.common.tables import Table


def peak(options: argparse.Namespace, strategies: list[str]) -> tuple[str, int]:
    """Answer a prompt; return the contender's name and the peak memory of the process in bytes.

    Without strategies, plain `generate()` is used.
    """
    options.strategy = strategies
    model, _ = by_prompt.begin(options)
    contender = by_prompt.ours(model, options)[-1]
    (ids, *_) = (p.encode(AutoTokenizer.from_pretrained(options.model)) for p in load_prompts())
    contender.run(ids, options.new_tokens, torch.ones_like(ids))
    return contender.name, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write the peaks as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    by_prompt.add_options(parser)
    options = parser.parse_args(argv)
    entries = [[], *([strategy] for strategy in options.strategy)]
    # A forked process would start with the peak of this one.
    workers = partial(ProcessPoolExecutor, 1, multiprocessing.get_context("spawn"))
    peaks = {}
    for entry in entries:
        with workers() as worker:
            name, found = worker.submit(peak, options, entry).result()
        peaks[name] = found
    rows = [[name, f"{found / 1e9:.2f}"] for name, found in peaks.items()]
    print(Table(["strategy", "peak, GB"], rows).markdown())
    timing.write_record(options, {"new_tokens": options.new_tokens, "peak_bytes": peaks})


if __name__ == "__main__":
    main()
