"""Compare lighteval with and without a stored strategy: answers and processor time.

    python -m examples.studies.integrations.lighteval_speed --items 6 --out lighteval.json

Uses the Python functions of `lm_eval_speed` and lighteval's transformers model. Needs the package
lighteval. Defaults: SmolLM2-135M-Instruct in float32, one thread.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lighteval.models.transformers.transformers_model import (
    TransformersModel,
    TransformersModelConfig,
)
from lighteval.tasks.requests import Doc, SamplingMethod

from examples.studies.models import load_model
from hf_spec.common.files import write_json
from hf_spec.common.machine import environment
from hf_spec.common.small_models import smollm2_135m_instruct

ITEMS = Path(__file__).with_name("functions.jsonl")
STRATEGIES = (None, "none", "lookup", "auto")


def answer(model: Any, folder: str, batch_size: int, items: int, new_tokens: int) -> dict[str, Any]:
    """Return the answers to the first items, and their processor seconds."""
    lines = ITEMS.read_text("utf-8").splitlines()[:items]
    docs = [
        Doc(
            query=json.loads(line)["prompt"],
            choices=[""],
            gold_index=0,
            id=str(number),
            task_name="functions",
            generation_size=new_tokens,
            stop_sequences=["\ndef"],
            sampling_methods=[SamplingMethod.GENERATIVE],
        )
        for number, line in enumerate(lines)
    ]
    # A temporary folder, because lighteval caches answers by model name.
    with tempfile.TemporaryDirectory() as cache:
        config = TransformersModelConfig(
            model_name=folder,
            batch_size=batch_size,
            cache_dir=cache,
            device="cpu",
            generation_parameters={"temperature": 0},
        )
        judged = TransformersModel.from_model(model, config)
        start = time.process_time()
        responses = judged.greedy_until(docs)
        seconds = time.process_time() - start
    texts = [response.text[0] for response in responses]
    return {"batch": batch_size, "seconds": round(seconds, 2), "answers": texts}


def main(argv: list[str] | None = None) -> None:
    """Measure every strategy, print the results, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or Hub id; default: SmolLM2-135M-Instruct")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--items", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    folder = str(options.model or smollm2_135m_instruct())
    model, _ = load_model(folder, options.dtype)
    runs = []
    for size in options.batch_sizes:
        plain: dict[str, Any] = {}
        for strategy in STRATEGIES:
            model.generation_config.spec_strategy = strategy
            # A warm-up call packs weights and measures round costs.
            answer(model, folder, size, 1, options.new_tokens)
            run = answer(model, folder, size, options.items, options.new_tokens)
            plain = plain or run
            run["same"] = sum(map(str.__eq__, run["answers"], plain["answers"]))
            run["speed"] = round(plain["seconds"] / run["seconds"], 2)
            runs.append({"strategy": strategy or "plain", **run})
            print(size, strategy, run["seconds"], run["speed"], run["same"], flush=True)
    facts = {"model": Path(folder).name, "dtype": options.dtype, "threads": options.threads}
    facts |= {"items": options.items, "new_tokens": options.new_tokens}
    write_json(options.out, {"environment": environment(), **facts, "runs": runs})


if __name__ == "__main__":
    main()
