"""Batch inference with Ray Data and speculative decoding.

    pip install "ray[data]"
    python examples/ray_data.py --model MODEL --prompts in.jsonl --out answers

Each line of `in.jsonl` has a `prompt`; the folder `answers` receives JSON lines with `prompt` and
`answer`. Every worker loads the model once. See docs/choosing.md for `--strategy`.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray


class Predictor:
    """Generator of answers to batches of prompts; Ray creates one per worker."""

    def __init__(self, model: str, strategy: str, new_tokens: int, threads: int):
        # Imported in the worker, after Ray has assigned its CPUs and GPUs.
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import hf_spec  # noqa: F401 - adds spec_strategy= to generate()

        torch.set_num_threads(threads)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        dtype = "auto" if device == "cuda" else torch.float32
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        if strategy != "plain":
            self.options["spec_strategy"] = strategy

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Add the column `answer` to a batch with the column `prompt`."""
        texts = [str(prompt) for prompt in batch["prompt"]]
        inputs = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        inputs = inputs.to(self.model.device)
        length = inputs["input_ids"].shape[1]
        said = self.model.generate(**inputs, **self.options)[:, length:]
        return {**batch, "answer": self.tokenizer.batch_decode(said, skip_special_tokens=True)}


def main() -> None:
    """Run the predictor over a file of prompts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--strategy", default="lookup")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of each worker")
    parser.add_argument("--gpus", type=float, default=0, help="of each worker")
    options = parser.parse_args()
    answers = ray.data.read_json(options.prompts, lines=True).map_batches(
        Predictor,
        fn_constructor_args=(
            options.model,
            options.strategy,
            options.max_new_tokens,
            options.threads,
        ),
        batch_size=options.batch_size,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
        num_cpus=options.threads,
        num_gpus=options.gpus,
    )
    answers.write_json(options.out)


if __name__ == "__main__":
    main()
