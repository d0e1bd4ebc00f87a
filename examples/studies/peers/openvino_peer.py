"""OpenVINO GenAI as a peer: greedy answers in float32, plainly or with its prompt lookup.

Runs in an environment of its own and imports nothing of hf_spec:

    python -m venv peers && peers/bin/pip install openvino-genai optimum-intel
    peers/bin/optimum-cli export openvino -m MODEL --task text-generation-with-past \
        --weight-format fp32 FOLDER
    peers/bin/python -m examples.studies.peers.openvino_peer FOLDER --lookup

The last command waits for the lines that `peer` describes. Products, keys and values are float32,
where OpenVINO would take bfloat16 and 8 bits on processors that have them; no prompt is kept for
the next repetition.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from examples.studies.peers import answering


def load(options: argparse.Namespace) -> tuple[dict[str, Any], answering.Answer]:
    """Return facts about the pipeline, and the function that answers with it."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    properties: dict[str, Any] = {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "INFERENCE_NUM_THREADS": options.threads,
    }
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    # The whole prompt in one forward.
    scheduler.max_num_batched_tokens = sys.maxsize
    pipeline = genai.LLMPipeline(
        options.folder,
        "CPU",
        scheduler_config=scheduler,
        **properties,
        **({"prompt_lookup": True} if options.lookup else {}),
    )
    config = pipeline.get_generation_config()
    config.do_sample = False
    drafts = {"num_assistant_tokens": options.draft_tokens, "max_ngram_size": options.match_length}
    for name, value in drafts.items() if options.lookup else ():
        setattr(config, name, value)

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        config.max_new_tokens = new_tokens
        tokens, mask = np.array([ids]), np.ones((1, len(ids)), dtype=np.int64)
        given = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(mask))
        return list(pipeline.generate(given, config).tokens[0])

    versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
    return {**versions, **properties, **(drafts if options.lookup else {})}, answer


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of the exported model")
    answering.add_options(parser)
    answering.run(load, parser.parse_args(argv))


if __name__ == "__main__":
    main()
