"""What becomes of every text and image-text class of transformers, with tiny models.

`python -m tests.targets.sweep` runs them all, writes the record and prints how many are served;
with names of classes it runs those alone. tests/targets/test_sweep.py compares.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from hf_spec import UnsupportedError
from tests.any_class import NotMadeError, build, classes, entries
from tests.tiny_models import left_padded

RECORD = Path(__file__).with_name("sweep.json")
NEW_TOKENS = {"one": 40, "ragged": 24}
# Plain `generate()` of these takes no prompt without an image.
WITH_IMAGES = ("blip",)
# What keeps the sweep from some classes, in words of our own.
IN_THE_WAY = {
    "Blip2ForConditionalGeneration": "takes no prompt without an image",
    "DiffusionGemmaForBlockDiffusion": "denoises blocks of tokens, is not autoregressive",
    "FastVlmForConditionalGeneration": "needs the package timm",
    "Gemma3nForConditionalGeneration": "needs the package timm",
    "Gemma4AssistantForCausalLM": "a draft model, which reads the keys and values of its target",
    "Gemma4UnifiedAssistantForCausalLM": "a draft model, which reads those of its target",
    "IdeficsForVisionText2Text": "takes no prompt without an image",
    "InstructBlipForConditionalGeneration": "takes no prompt without an image",
    "InstructBlipVideoForConditionalGeneration": "takes no prompt without a video",
    "Kosmos2ForConditionalGeneration": "takes no prompt without an image",
    "MusicgenForCausalLM": "its tokens are codes of sound",
    "MusicgenMelodyForCausalLM": "its tokens are codes of sound, its generate() takes no strategy",
    "PI0ForConditionalGeneration": "predicts actions, has no generate()",
    "PPFormulaNetForConditionalGeneration": "takes images alone",
    "PerceptionLMForConditionalGeneration": "needs the package timm",
    "Pix2StructForConditionalGeneration": "takes no prompt without an image",
    "UdopForConditionalGeneration": "takes no prompt without the layout of a page",
    "VisionEncoderDecoderModel": "takes images alone",
}
IDENTICAL, REFUSED, WRONG, NOT_MADE = "identical", "refused", "wrong", "not made"


@dataclass(frozen=True)
class Outcome:
    """What becomes of a class.

    Attributes:
        one: of one prompt.
        ragged: of a batch with padding; "not made" where plain `generate()` takes none.
        why: the sentence of a refusal, or what was in the way.
    """

    one: str
    ragged: str = NOT_MADE
    why: str = ""


@cache
def prompts() -> dict[str, dict[str, Tensor]]:
    """One prompt that repeats itself, and three of unlike lengths, for drafts by lookup."""
    generator = torch.Generator().manual_seed(1)
    seven, five, four = (torch.randint(3, 80, (n,), generator=generator) for n in (7, 5, 4))
    long = seven.repeat(4)[:24]
    return {
        "one": {"input_ids": long[None]},
        "ragged": left_padded([long, five.repeat(3)[:13], four]),
    }


@cache
def outcome(kind: str, name: str) -> Outcome:
    """What becomes of a class; an error that is not one of ours is raised."""
    if name in IN_THE_WAY:
        return Outcome(NOT_MADE, why=IN_THE_WAY[name])
    try:
        model = build(kind, name)
        one, why = _compare(model, "one")
    except NotMadeError as error:
        return Outcome(NOT_MADE, why=_line(error))
    if one != IDENTICAL:
        return Outcome(one, why=why)
    try:
        ragged, why = _compare(model, "ragged")
    except NotMadeError as error:
        # Some classes take no batch, or none with padding.
        ragged, why = NOT_MADE, _line(error)
    return Outcome(one, ragged, why)


def _compare(model: Any, kind: str) -> tuple[str, str]:
    """Beside plain `generate()`: what came out, and the sentence of a refusal."""
    try:
        expected = _generate(model, kind)
    except Exception as error:
        raise NotMadeError(f"plain generate(): {type(error).__name__}: {error}") from error
    try:
        found = _generate(model, kind, spec_strategy="lookup")
    except UnsupportedError as error:
        return REFUSED, str(error)
    return IDENTICAL if torch.equal(found, expected) else WRONG, ""


def _generate(model: Any, kind: str, **options: Any) -> Tensor:
    given = prompts()[kind]
    if model.config.model_type in WITH_IMAGES:
        rows, size = len(given["input_ids"]), model.config.vision_config.image_size
        given = {**given, "pixel_values": torch.ones(rows, 3, size, size)}
    tokens: Tensor = model.generate(
        **given, max_new_tokens=NEW_TOKENS[kind], do_sample=False, **options
    )
    return tokens


def _line(error: Exception) -> str:
    """The first line of what an error says, without what differs from run to run."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


@cache
def record() -> dict[str, Outcome]:
    """Class -> what became of it, as it was recorded."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Outcome(**found) for name, found in kept["classes"].items()}


@cache
def recorded_version() -> str:
    """The version of transformers that the record is of."""
    version: str = json.loads(RECORD.read_text(encoding="utf-8"))["transformers"]
    return version


def counts(found: Mapping[str, Outcome]) -> tuple[Counter[str], Counter[str]]:
    """How many classes, and how many entries of the two mappings, came out how."""
    return _count(found.values()), _count(found[name] for _, name in entries() if name in found)


def _count(found: Iterable[Outcome]) -> Counter[str]:
    return Counter(WRONG if WRONG in (each.one, each.ragged) else each.one for each in found)


def main(names: list[str]) -> None:
    """Run the named classes, or all of them, and write what became of all into the record."""
    chosen = [pair for pair in classes() if not names or pair[1] in names]
    found = {**record()} if names else {}
    for kind, name in chosen:
        try:
            found[name] = outcome(kind, name)
        except Exception as error:  # noqa: BLE001 - a crash stands in the record until mended
            found[name] = Outcome(WRONG, why=f"{type(error).__name__}: {_line(error)}")
        sys.stdout.write(f"{name}: {found[name]}\n")
        sys.stdout.flush()
        outcome.cache_clear()
    kept = {name: asdict(found[name]) for name in sorted(found)}
    text = json.dumps({"transformers": transformers.__version__, "classes": kept}, indent=1)
    RECORD.write_text(text + "\n", encoding="utf-8")
    for what, count in zip(("classes", "entries"), counts(found), strict=True):
        sys.stdout.write(f"{count.total()} {what}: {dict(count)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
