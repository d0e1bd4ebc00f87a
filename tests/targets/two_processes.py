"""Script for two processes that share the weights of a model, with gloo on the CPU.

Reads models from the given folder and writes `rank0.json` and `rank1.json`: case -> result, or the
message of the error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_spec
from tests import tiny_models
from tests.targets import image_cases
from tests.targets.cases import NEW_TOKENS, SEED, assistant_of, sampled, speculate

ARCHITECTURES = ("llama", "gemma3", "gpt_neox", "mixtral")
STRATEGIES = ("lookup", "draft", "tree", "gsd", "disco", "sdsat", "auto")


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in ARCHITECTURES:
        model = load(folder / name)
        for strategy in STRATEGIES if name == "llama" else STRATEGIES[:3]:
            found[f"{name} {strategy}"] = speculate(model, name, strategy, "ragged")
    found["images"] = pictures(load(folder / "images"))
    model = load(folder / "llama")
    rank = distributed.get_rank()
    for strategy in ("draft", "tree"):
        torch.manual_seed(SEED)
        found[f"sampled {strategy}"] = sampled(model, strategy)
    torch.manual_seed(SEED)
    found["continuous"] = continuous(model)
    found.update(refusals(model, rank))
    odd, shards = load(folder / "odd"), fully_sharded(folder / "llama")
    prompt = tiny_models.repetitive_prompt()
    found["heads"] = refused(lambda: odd.generate(prompt, spec_strategy="lookup"))
    found["fsdp"] = refused(lambda: shards.generate(prompt, spec_strategy="lookup"))
    (folder / f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


def load(folder: Path) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto").eval()
    assert any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
    return model


def fully_sharded(folder: Path) -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def continuous(model: PreTrainedModel) -> list[list[int]]:
    """Return sampled answers to three prompts, at most two of them in a batch."""
    output = model.generate_batch(
        [[5, 6, 7, 5, 6], [8, 9], [5, 6, 7]],
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        spec_strategy="lookup",
        max_batch=2,
    )
    return [request.generated_tokens for request in output.values()]


def pictures(model: PreTrainedModel) -> dict[str, Any]:
    """Return greedy tokens for prompts with images, with and without a strategy."""
    call = {**image_cases.with_images("gemma3", "ragged"), "max_new_tokens": NEW_TOKENS}
    call["do_sample"] = False
    output = model.generate(**call, spec_strategy="lookup")
    return {"tokens": output.tolist(), "plain": model.generate(**call).tolist()}


def refusals(model: PreTrainedModel, rank: int) -> dict[str, str]:
    prompt, other = tiny_models.repetitive_prompt(), tiny_models.repetitive_prompt(seed=rank)
    gated = tiny_models.sdsat_adapter("llama")
    torch.manual_seed(rank)
    return {
        "seeds": refused(lambda: sampled(model, "draft")),
        "inputs": refused(lambda: model.generate(other, spec_strategy="lookup")),
        "auto": refused(lambda: model.generate(prompt, spec_strategy="auto")),
        "falcon": refused(lambda: assistant_of(model, "llama", "falcon")),
        "gated": refused(lambda: model.generate(prompt, spec_strategy="sdsat", assistant=gated)),
    }


def refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except hf_spec.UnsupportedError as error:
        return str(error)
    return "served"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
