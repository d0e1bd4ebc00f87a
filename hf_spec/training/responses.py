"""The target's own answers to a list of prompts: the data of every training.

Greedy answers are what a drafter has to predict in greedy decoding; sampled ones add texts if there
are few prompts.

The format is JSON lines. The first line has the model and the settings, every other line an answer
with its token ids and its key (see `answer_keys`). Lines are written batch by batch, so an
interrupted run resumes after the last whole line.
"""

from __future__ import annotations

import hashlib
import json
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import source_path
from hf_spec.common.errors import OptionError
from hf_spec.common.files import check_regular, parse_json, resume_lines
from hf_spec.common.prompts import Prompt
from hf_spec.training.settings import BATCH_SIZE, ResponseSettings

FORMAT = "hf_spec.responses"
KEY_LENGTH = 16
# Integers of each size, by which any dtype can be summed exactly.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
CHUNK = 1 << 20


@dataclass(frozen=True)
class Response:
    """A prompt with its `id` and `task`, and the target's answer, as token ids.

    The prompt includes the chat template; the answer includes the end-of-sequence token, unless it
    was cut at the length limit.
    """

    id: str
    task: str
    prompt: list[int]
    response: list[int]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.response)


FIELDS = tuple(field.name for field in fields(Response))


def generate_responses(  # noqa: PLR0913 - prompts, file, settings, and callbacks
    model: PreTrainedModel,
    tokenizer: Any,
    prompts: Sequence[Prompt],
    path: Path,
    settings: ResponseSettings,
    batch_size: int = BATCH_SIZE,
    progress: Callable[[int, int], None] = lambda done, tokens: None,
    recorder: Any = None,
) -> int:
    """Write the answers of `model` to JSON lines in `path`, resuming from what it already holds.

    Answers are matched with prompts by content, so prompts may be reordered or added between calls.
    The tokenizer may have a chat template. `progress` is called after every batch with its numbers
    of prompts and of new tokens. A `FeatureRecorder` stores the features of the answers too.

    Returns the number of prompts that were skipped because they are too long. Raises `OptionError`
    if `path` is of another model or other settings, or holds answers to other prompts.
    """
    head = {"format": FORMAT, **model_facts(model), **asdict(settings)}
    encoded = [(p, p.encode(tokenizer)[0]) for p in prompts]
    fitting = [(p, ids) for p, ids in encoded if len(ids) <= settings.max_prompt_tokens]
    keys = answer_keys(head, (ids.tolist() for _, ids in fitting))
    answered = {line.get("key") for line in resume_lines(path, head)}
    check_answered(path, answered, keys)
    todo = [(key, *rest) for key, rest in zip(keys, fitting, strict=True) if key not in answered]
    ends = end_tokens(model)
    with path.open("a", encoding="utf-8") as file:
        for start in range(0, len(todo), batch_size):
            batch = todo[start : start + batch_size]
            # Seeded by the index in the file, so a resumed run equals an uninterrupted one.
            torch.manual_seed(settings.seed * 1_000_003 + len(answered) + start)
            answers = _answer(model, [ids for _, _, ids in batch], settings, ends, recorder)
            responses = [
                Response(prompt.id, prompt.task, ids.tolist(), answer)
                for (_, prompt, ids), answer in zip(batch, answers, strict=True)
            ]
            for (key, *_), response in zip(batch, responses, strict=True):
                file.write(json.dumps({**asdict(response), "key": key}) + "\n")
            file.flush()
            if recorder is not None:
                recorder.keep(responses, len(answered) + start)
            progress(len(batch), sum(map(len, answers)))
    return len(encoded) - len(fitting)


def read_responses(path: Path) -> Iterator[Response]:
    """Yield the answers in a file of `generate_responses`, even while it is written.

    An incomplete last line is skipped. Raises `OptionError` if it is another file, or a line is not
    a prompt with an answer.
    """
    check_regular(path)
    with path.open("rb") as file:
        try:
            head = json.loads(file.readline().removeprefix(BOM_UTF8) or "{}")
        except (ValueError, RecursionError):
            head = None
        if not isinstance(head, dict) or head.get("format") != FORMAT:
            raise OptionError(
                f"{path} is not a file of responses; write one: hf-spec train responses"
            )
        for number, line in enumerate(file, start=2):
            if line.endswith((b"\n", b"}")):
                yield _response(f"{path}, line {number}", line)


def _response(where: str, line: bytes) -> Response:
    row = parse_json(line, where)
    try:
        response = Response(**{name: row[name] for name in FIELDS if name in row})
        texts = response.prompt, response.response
        valid = all(text and all(type(token) is int for token in text) for text in texts)
    except TypeError:
        valid = False
    if not valid:
        text = line.decode(errors="replace").strip()
        raise OptionError(
            f"{where}: {text[:60]!r} is not the id, task, prompt and response of an answer, with "
            "at least one token of each text; remove the line"
        )
    return response


def end_tokens(model: PreTrainedModel) -> set[int]:
    """Return the end-of-sequence tokens of a model."""
    ends: Any = model.generation_config.eos_token_id
    return set(ends) if isinstance(ends, list) else {ends} - {None}


def until_end(tokens: list[int], ends: Collection[int]) -> list[int]:
    """Return the tokens up to and including the first end-of-sequence token."""
    length = next((i for i, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: length + 1]


def frequent_tokens(texts: Iterable[Iterable[int]], size: int, always: Iterable[int]) -> Tensor:
    """Return up to `size` token ids, ascending: those of `always`, and the most frequent ones.

    Ties go to the lower id.
    """
    counts = Counter(token for text in texts for token in text)
    chosen = set(always)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(chosen) >= size:
            break
        chosen.add(token)
    return torch.tensor(sorted(chosen), dtype=torch.long)


def answer_vocabulary(
    model: PreTrainedModel, responses: Iterable[Response], size: int | None
) -> Tensor | None:
    """Return (R,) int64, the end tokens and the most frequent tokens of the answers.

    Tokens of the prompts are added if the answers have fewer than `size`. None for no limit.
    """
    if size is None:
        return None
    answers = list(responses)
    ends = end_tokens(model)
    answered = frequent_tokens((r.response for r in answers), size, ends)
    if len(answered) >= size:
        return answered
    return frequent_tokens((r.prompt for r in answers), size, answered.tolist())


def _answer(
    model: PreTrainedModel,
    prompts: Sequence[Tensor],
    settings: ResponseSettings,
    ends: set[int],
    recorder: Any,
) -> list[list[int]]:
    """Return the answers to prompts of any lengths, cut after their end-of-sequence token."""
    padded = partial(pad_sequence, batch_first=True, padding_side="left")
    rows, mask = padded(list(prompts)), padded([torch.ones_like(ids) for ids in prompts])
    sampling: dict[str, Any] = {"do_sample": False}
    if settings.temperature:
        sampling = {"do_sample": True, "temperature": settings.temperature, "top_k": 0}
    with torch.inference_mode():
        generate: Any = model.generate
        output = generate(
            rows.to(model.device),
            attention_mask=mask.to(model.device),
            max_new_tokens=settings.max_new_tokens,
            **sampling,
            spec_strategy="none",
            assistant=recorder,
        )
    return [until_end(row, ends) for row in output[:, rows.shape[1] :].tolist()]


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
