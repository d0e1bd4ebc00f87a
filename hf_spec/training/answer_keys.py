"""Keys of stored answers: the model, the settings and the prompt that an answer belongs to.

A file of answers is resumed by key, so a prompt keeps its answer when prompts are reordered or
added, and an answer of another model or of other settings is never reused.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.base_name import source_path
from hf_spec.common.errors import OptionError

KEY_LENGTH = 16
# Integers of each size, by which any dtype can be summed exactly.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
CHUNK = 1 << 20


def model_facts(model: PreTrainedModel) -> dict[str, str]:
    """Return what identifies a model in a file of answers: its path, weights and dtype."""
    return {
        "model": source_path(model),
        "weights": weights_digest(model),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def weights_digest(model: PreTrainedModel) -> str:
    """Return a digest of all weights, the same on every device; it reads each weight once."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if isinstance(tensor, Tensor):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(json.dumps(_bit_sums(tensor)).encode())
    return digest.hexdigest()[:KEY_LENGTH]


def _bit_sums(tensor: Tensor) -> list[int]:
    """Sum the bits of a tensor as integers, chunk by chunk; exact in any order of summation."""
    if tensor.is_meta or not tensor.numel():
        return []
    bits = tensor.detach().reshape(-1).view(INTEGERS.get(tensor.itemsize, torch.int64))
    return torch.stack([part.sum(dtype=torch.int64) for part in bits.split(CHUNK)]).tolist()


def answer_keys(facts: Mapping[str, Any], prompts: Iterable[Sequence[int]]) -> list[str]:
    """Return the key of every prompt's answer.

    `facts` are what else the answers depend on: the model and the settings, as JSON values.
    `prompts` are token ids with the chat template. Each of several equal prompts has its own key.
    """
    run, seen, keys = json.dumps(facts, sort_keys=True), Counter[str](), []
    for prompt in prompts:
        text = json.dumps(list(prompt))
        digest = hashlib.sha256(f"{run}\n{text}\n{seen[text]}".encode())
        seen[text] += 1
        keys.append(digest.hexdigest()[:KEY_LENGTH])
    return keys


def check_answered(path: Path, answered: Iterable[str | None], keys: Iterable[str]) -> None:
    """Reject a file with answers whose keys are not among the `keys` of this run's prompts."""
    if others := set(answered) - set(keys):
        raise OptionError(
            f"{path} holds answers to {len(others)} prompts that are not among the prompts of this "
            "run; choose another file, delete this one, or add the missing prompts"
        )
