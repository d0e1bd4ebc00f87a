"""Sweep over every text and image-text class of transformers, with tiny models.

`python -m tests.targets.sweep` runs all classes, writes the record (sweep.json) and prints the
number of each outcome. Given class names, it runs only those. tests/targets/test_sweep.py compares
outcomes with the record.
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
# Plain `generate()` of these model types requires an image.
WITH_IMAGES = ("blip",)
# Class that the sweep cannot run -> reason.
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
    """Result of running a class.

    Attributes:
        one: result for one prompt.
        ragged: result for a padded batch; "not made" if plain `generate()` does not support one.
        why: the error message, or the reason that the class cannot run.
    """

    one: str
    ragged: str = NOT_MADE
    why: str = ""


@cache
def prompts() -> dict[str, dict[str, Tensor]]:
    """Return one repetitive prompt, and three of different lengths, for drafts by lookup."""
    generator = torch.Generator().manual_seed(1)
    seven, five, four = (torch.randint(3, 80, (n,), generator=generator) for n in (7, 5, 4))
    long = seven.repeat(4)[:24]
    return {
        "one": {"input_ids": long[None]},
        "ragged": left_padded([long, five.repeat(3)[:13], four]),
    }


@cache
def outcome(kind: str, name: str) -> Outcome:
    """Run a class and return its outcome; unexpected errors propagate."""
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
        # Some classes do not support batches, or padding.
        ragged, why = NOT_MADE, _line(error)
    return Outcome(one, ragged, why)


def _compare(model: Any, kind: str) -> tuple[str, str]:
    """Compare lookup with plain `generate()`; return the result and the error message, if any."""
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
    """Return the first line of an error message, at most 160 characters."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160]


@cache
def record() -> dict[str, Outcome]:
    """Return the recorded outcome of every class, by class name."""
    kept = json.loads(RECORD.read_text(encoding="utf-8"))
    return {name: Outcome(**found) for name, found in kept["classes"].items()}


@cache
def recorded_version() -> str:
    """Return the version of transformers that the record was made with."""
    version: str = json.loads(RECORD.read_text(encoding="utf-8"))["transformers"]
    return version


def counts(found: Mapping[str, Outcome]) -> tuple[Counter[str], Counter[str]]:
    """Count each outcome over the classes, and over the entries of the two mappings."""
    return _count(found.values()), _count(found[name] for _, name in entries() if name in found)


def _count(found: Iterable[Outcome]) -> Counter[str]:
    return Counter(WRONG if WRONG in (each.one, each.ragged) else each.one for each in found)


def main(names: list[str]) -> None:
    """Run the named classes, or all of them, and write their outcomes to the record."""
    chosen = [pair for pair in classes() if not names or pair[1] in names]
    found = {**record()} if names else {}
    for kind, name in chosen:
        try:
            found[name] = outcome(kind, name)
        except Exception as error:  # noqa: BLE001 - a crash is recorded until it is fixed
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
