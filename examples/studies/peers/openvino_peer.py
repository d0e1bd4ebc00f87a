"""OpenVINO GenAI as a peer: greedy answers, also with its prompt lookup or a draft model.

Runs in a separate environment and does not import hf_spec:

    python -m venv peers && peers/bin/pip install openvino-genai optimum-intel
    peers/bin/optimum-cli export openvino -m MODEL --task text-generation-with-past \
        --weight-format fp32 FOLDER
    peers/bin/python -m examples.studies.peers.openvino_peer FOLDER --lookup

The last command reads the requests that `peer` describes. Matmuls and the KV cache are float32;
with `--default-precision`, they have OpenVINO's defaults on this processor, such as bfloat16 and 8
bits. Prefix caching is off, so repetitions do not reuse prompts.
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

    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": options.threads}
    if not options.default_precision:
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    more: dict[str, Any] = {}
    drafts: dict[str, int] = {}
    if options.draft is not None:
        more["draft_model"] = genai.draft_model(options.draft, "CPU", **properties)
        drafts = {"num_assistant_tokens": options.draft_tokens}
    elif options.lookup:
        more["prompt_lookup"] = True
        drafts = {
            "num_assistant_tokens": options.draft_tokens,
            "max_ngram_size": options.match_length,
        }
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    # Run the whole prompt in one forward pass.
    scheduler.max_num_batched_tokens = sys.maxsize
    pipeline = genai.LLMPipeline(
        options.folder,
        "CPU",
        scheduler_config=scheduler,
        **properties,
        **more,
    )
    config = pipeline.get_generation_config()
    config.do_sample = False
    for name, value in drafts.items():
        setattr(config, name, value)

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        config.max_new_tokens = new_tokens
        tokens, mask = np.array([ids]), np.ones((1, len(ids)), dtype=np.int64)
        given = genai.TokenizedInputs(openvino.Tensor(tokens), openvino.Tensor(mask))
        return list(pipeline.generate(given, config).tokens[0])

    versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
    return {**versions, **properties, **drafts}, answer


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", help="of the exported model")
    parser.add_argument("--draft", help="folder of a draft model, exported as well")
    parser.add_argument("--default-precision", action="store_true", help="OpenVINO's own choice")
    answering.add_options(parser)
    answering.run(load, parser.parse_args(argv))


if __name__ == "__main__":
    main()
