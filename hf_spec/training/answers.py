"""Packed forward passes over answers, with results cached on disk in shards.

A pass over all answers takes minutes to hours. Its results are written shard by shard, so an
interrupted pass resumes and later trainings read them. `teacher_examples` caches the target's most
probable tokens at each position of an answer, for distillation.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import BaseModel, local_name
from hf_spec.common.errors import OptionError
from hf_spec.common.files import atomic_write
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.training.responses import Response

SHARD_RESPONSES = 256
# Answer tokens per packed forward pass; limits the memory of their logits.
FORWARD_TOKENS = 1024

# Keys of `learned_from`.
LEARNED_FROM = ("target", "weights", "answers")


def answer_logits(
    model: PreTrainedModel, batch: Sequence[Response], vocab_size: int | None = None
) -> Tensor:
    """Return (answer tokens, V) logits before each answer token, by one packed forward pass.

    `vocab_size` is V if the model's own differs by padding.
    """
    chains = [[*r.prompt[-1:], *r.response[:-1]] for r in batch]
    tree = DraftTree.from_rows([(chain, list(range(-1, len(chain) - 1))) for chain in chains])
    runner = ModelRunner(model, len(batch), vocab_size=vocab_size)
    with runner.active():
        return runner.forward(tree, [response.prompt for response in batch]).logits


def answer_len(response: Response) -> int:
    """Return the number of tokens of an answer."""
    return len(response.response)


def answer_batches(
    responses: Sequence[Response], length: Callable[[Response], int] = answer_len
) -> Iterator[list[Response]]:
    """Yield consecutive answers in groups of at most FORWARD_TOKENS tokens, counted by `length`."""
    batch: list[Response] = []
    size = 0
    for response in responses:
        if batch and size + length(response) > FORWARD_TOKENS:
            yield batch
            batch, size = [], 0
        batch.append(response)
        size += length(response)
    if batch:
        yield batch


def learned_from(model: PreTrainedModel, responses: Sequence[Response]) -> dict[str, str]:
    """Return what a checkpoint must agree with besides settings: target and digest of answers."""
    digests = "".join(map(_digest, responses))
    return {**target_facts(model), "answers": hashlib.sha256(digests.encode()).hexdigest()[:16]}


def target_facts(model: PreTrainedModel) -> dict[str, str]:
    """Return the identity of a target: its name, and sizes and weights to compare by `agrees`."""
    return {"target": local_name(model), "weights": json.dumps(asdict(BaseModel.of(model)))}


def agrees(name: str, stored: Any, current: Any) -> bool:
    """Return True if a stored fact equals the current one; a missing fact is None."""
    if name != "weights":
        return bool(stored == current)
    # Files of older versions have the target's name alone.
    if stored is None or current is None:
        return True
    # Weights are compared up to rounding, because the dtype may differ.
    before, after = (BaseModel.read(json.loads(text), Path(name)) for text in (stored, current))
    return before.difference(after) is None


def stored(
    folder: Path,
    name: str,
    responses: Sequence[Response],
    facts: dict[str, str],
    compute: Callable[[Sequence[Response]], dict[str, Tensor]],
    length: Callable[[Response], int] = answer_len,
) -> Iterator[tuple[Response, dict[str, Tensor]]]:
    """Yield each answer with its part of the tensors, on the CPU, computed if `folder` lacks it.

    Args:
        folder: created if it is missing; one safetensors file per 256 answers.
        name: name of the files and of the progress bar.
        responses: in a fixed order, none of them empty; more may be appended between calls.
        facts: what the result depends on besides the answers; others raise `OptionError`.
        compute: answers -> tensors whose first dimension is the concatenated tokens of all answers.
        length: entries of that dimension per answer.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starts = range(0, len(responses), SHARD_RESPONSES)
    for index, start in enumerate(tqdm(starts, desc=name, disable=None)):
        shard = responses[start : start + SHARD_RESPONSES]
        path = _shard(folder, name, index)
        num_stored = _check(path, facts, list(map(_digest, shard))) if path.exists() else 0
        if num_stored < len(shard):
            with torch.inference_mode():
                tensors = compute(shard[num_stored:])
            if num_stored:
                before = load_file(path)
                tensors = {key: torch.cat([before[key], new]) for key, new in tensors.items()}
            write_shard(folder, name, index, shard, facts, tensors)
        lengths = list(map(length, shard))
        columns = {key: tensor.split(lengths) for key, tensor in load_file(path).items()}
        for position, response in enumerate(shard):
            yield response, {key: column[position] for key, column in columns.items()}


def write_shard(
    folder: Path,
    name: str,
    index: int,
    responses: Sequence[Response],
    facts: dict[str, str],
    tensors: dict[str, Tensor],
) -> None:
    """Write one file of `stored`, with the results of up to 256 answers, from 256 * `index` on."""
    digests = json.dumps(list(map(_digest, responses)))
    with atomic_write(_shard(folder, name, index)) as part:
        save_file(tensors, part, metadata={**facts, "answers": digests})


def _shard(folder: Path, name: str, index: int) -> Path:
    return folder / f"{name.replace(' ', '-')}-{index:05d}.safetensors"


def _check(path: Path, facts: dict[str, str], digests: Sequence[str]) -> int:
    """Return the number of answers in a shard, which must be the first ones of `digests`."""
    metadata = read_metadata(path, "delete it, and it is computed again")
    answers = json.loads(metadata.pop("answers", "[]"))
    differing = sorted(name for name in facts if not agrees(name, metadata.get(name), facts[name]))
    if answers != digests[: len(answers)] or not answers:
        differing.append("answers")
    if differing:
        raise OptionError(
            f"{path} was made with another {', '.join(differing)}: choose another folder, or "
            f"delete {path.parent}"
        )
    return len(answers)


def read_metadata(path: Path, remedy: str) -> dict[str, str]:
    """Return the metadata of a safetensors file; if it is damaged, raise with `remedy`."""
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise OptionError(f"{path} is damaged ({error}); {remedy}") from error


def _digest(response: Response) -> str:
    text = json.dumps(asdict(response), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Example:
    """An answer of T tokens with the target's K most probable tokens at each position.

    `top_tokens` is (T, K) int64; `top_probs` is (T, K) float32, over the whole vocabulary.
    """

    response: Response
    top_tokens: Tensor
    top_probs: Tensor

    @classmethod
    def without_teacher(cls, response: Response) -> Example:
        """Return an example without the target's predictions: K is 0."""
        nothing = torch.zeros(len(response.response), 0)
        return cls(response, nothing.long(), nothing)


def teacher_examples(
    model: PreTrainedModel, responses: Sequence[Response], folder: Path, top: int = 32
) -> list[Example]:
    """Return examples with the `top` K tokens, computed if `folder` lacks them; see `stored`.

    `folder` takes about 6 x K bytes per answer token.
    """

    def compute(shard: Sequence[Response]) -> dict[str, Tensor]:
        parts = []
        for batch in answer_batches(shard):
            scores = answer_logits(model, batch).float().log_softmax(dim=-1)
            parts.append(scores.topk(top, dim=-1))
        return {
            "tokens": torch.cat([tokens.int().cpu() for _, tokens in parts]),
            "log_probs": torch.cat([values.half().cpu() for values, _ in parts]),
        }

    facts = {**target_facts(model), "top": str(top)}
    return [
        Example(response, top["tokens"].long(), top["log_probs"].float().exp())
        for response, top in stored(folder, "teacher", responses, facts, compute)
    ]
