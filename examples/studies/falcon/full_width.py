"""Copy a model with one key-value head per query head.

A Falcon head copies the target's last layer. With grouped-query attention its keys and values are
narrow: SmolLM2-135M has three key-value heads for nine query heads. This copy repeats them, so the
model computes the same, and a Falcon head for it starts with full-width keys and values. Train the
head on answers of the original model. Run as
`python -m examples.studies.falcon.full_width --model MODEL --out FOLDER`.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from examples.studies.models import load_model

REPEATED = (".k_proj.", ".v_proj.")


def full_width(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` in which every query head has its own keys and values."""
    config = copy.deepcopy(model.config)
    narrow, wide_heads = config.num_key_value_heads, config.num_attention_heads
    config.num_key_value_heads = wide_heads
    weights = {
        name: _repeated(weight, narrow, wide_heads) if any(p in name for p in REPEATED) else weight
        for name, weight in model.state_dict().items()
    }
    wide = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    wide.load_state_dict(weights)
    wide.generation_config = model.generation_config
    return wide


def _repeated(weight: torch.Tensor, narrow: int, wide_heads: int) -> torch.Tensor:
    """Repeat the rows of each of `narrow` heads, to `wide_heads` heads."""
    heads = weight.unflatten(0, (narrow, -1))
    return heads.repeat_interleave(wide_heads // narrow, dim=0).flatten(0, 1)


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--out", type=Path, required=True, help="folder of the copy")
    options = parser.parse_args(argv)
    model, tokenizer = load_model(options.model)
    full_width(model).save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)


if __name__ == "__main__":
    main()
