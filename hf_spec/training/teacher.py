"""What the target thought at every position of its answers, computed once and kept on disk.

Distilling needs the target's next-token distribution at each answer token. Its top tokens are
stored in shards; every training and every epoch after the first reads them back instead of running
the target again. The pass is the engine's own packed forward: no padding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.adapters.folder import BaseModel
from hf_spec.decoding.runner import ModelRunner
from hf_spec.decoding.tree import DraftTree
from hf_spec.errors import OptionError
from hf_spec.training.responses import Response

SHARD_RESPONSES = 512
# Answer tokens of one packed forward: their logits over the whole vocabulary are held at once.
FORWARD_TOKENS = 1024


@dataclass(frozen=True)
class Example:
    """An answer with the target's opinion at each of its T tokens.

    Attributes:
        response: prompt and answer.
        top_tokens: (T, K) int64, the target's K most probable tokens, given what precedes.
        top_probs: (T, K) float32, their probabilities over the whole vocabulary.
    """

    response: Response
    top_tokens: Tensor
    top_probs: Tensor


def teacher_examples(
    model: PreTrainedModel, responses: Sequence[Response], folder: Path, top: int = 32
) -> list[Example]:
    """Examples for all `responses`, computed where `folder` does not hold them yet.

    Args:
        model: the target.
        responses: answers in a fixed order; more may be appended between calls.
        folder: holds one safetensors file per 512 responses, about 6 bytes x K per answer token.
        top: K.

    Raises:
        OptionError: if `folder` was made from another model, K or other responses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    examples: list[Example] = []
    starts = range(0, len(responses), SHARD_RESPONSES)
    for index, start in enumerate(tqdm(starts, desc="target's opinion", disable=None)):
        shard = responses[start : start + SHARD_RESPONSES]
        facts = {
            "base": BaseModel.of(model).name,
            "top": str(top),
            "responses": json.dumps([response.id for response in shard]),
        }
        path = folder / f"teacher-{index:05d}.safetensors"
        if not path.exists() or _is_shorter(path, facts):
            part = path.with_suffix(".part")
            save_file(_run(model, shard, top), part, metadata=facts)
            part.replace(path)
        with safe_open(path, "pt") as file:
            found = file.metadata()
        if found != facts:
            raise OptionError(
                f"{path} belongs to another run (model {found.get('base')!r}, top "
                f"{found.get('top')}): choose another folder or delete it"
            )
        examples.extend(_split(shard, load_file(path)))
    return examples


def _is_shorter(path: Path, facts: dict[str, str]) -> bool:
    """Whether the shard holds the first of these responses only; more were generated since."""
    with safe_open(path, "pt") as file:
        found = file.metadata()
    ids, wanted = json.loads(found.pop("responses")), json.loads(facts["responses"])
    same = found == {key: facts[key] for key in found}
    return same and len(ids) < len(wanted) and wanted[: len(ids)] == ids


def _split(shard: Sequence[Response], tensors: dict[str, Tensor]) -> Iterator[Example]:
    lengths = [len(response.response) for response in shard]
    tokens = tensors["tokens"].long().split(lengths)
    probs = tensors["log_probs"].float().exp().split(lengths)
    for response, top_tokens, top_probs in zip(shard, tokens, probs, strict=True):
        yield Example(response, top_tokens, top_probs)


@torch.inference_mode()
def _run(model: PreTrainedModel, shard: Sequence[Response], top: int) -> dict[str, Tensor]:
    """The top tokens at every answer position of a shard, answers one after the other."""
    tokens: dict[int, Tensor] = {}
    log_probs: dict[int, Tensor] = {}
    for batch in _batches(shard):
        rows = [(s.prompt[-1:] + s.response[:-1], _chain(len(s.response))) for _, s in batch]
        tree = DraftTree.from_rows(rows)
        runner = ModelRunner(model, len(batch))
        with runner.active():
            logits = runner.forward(tree, [s.prompt for _, s in batch]).logits
        values, ids = logits.float().log_softmax(dim=-1).topk(top, dim=-1)
        lengths = [len(s.response) for _, s in batch]
        for (place, _), mine, likely in zip(
            batch, ids.cpu().split(lengths), values.cpu().split(lengths), strict=True
        ):
            tokens[place], log_probs[place] = mine.int(), likely.half()
    order = range(len(shard))
    return {
        "tokens": torch.cat([tokens[place] for place in order]),
        "log_probs": torch.cat([log_probs[place] for place in order]),
    }


def _batches(shard: Sequence[Response]) -> Iterator[list[tuple[int, Response]]]:
    """(place, response) in groups of at most FORWARD_TOKENS answer tokens."""
    batch: list[tuple[int, Response]] = []
    size = 0
    for place, response in enumerate(shard):
        if batch and size + len(response.response) > FORWARD_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append((place, response))
        size += len(response.response)
    if batch:
        yield batch


def _chain(length: int) -> list[int]:
    return list(range(-1, length - 1))
