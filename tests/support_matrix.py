"""docs/support-matrix.md, made from what the tests are parametrised with.

`python -m tests.support_matrix` writes the page; tests/test_docs.py compares.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.engine.models.internal_positions import uses_alibi
from hf_spec.engine.models.recurrent_layers import resumes
from tests import hybrid_models, tiny_models
from tests.any_class import classes, entries
from tests.hybrid_models import DELTA_NETS, HYBRIDS, PURE
from tests.targets import (
    image_cases,
    test_half_precision,
    test_hybrids,
    test_image_text,
    test_whisper,
    whisper_cases,
)
from tests.targets.families import FAMILIES, family_of
from tests.targets.sweep import (
    IDENTICAL,
    NOT_MADE,
    REFUSED,
    WRONG,
    counts,
    record,
    recorded_version,
)
from tests.test_identity import STRATEGIES

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "support-matrix.md"

SPEECH = test_whisper.STRATEGIES.values()
# Files of tests/targets with constants KINDS, how weights are kept, and STRATEGIES.
KEPT_OTHERWISE = ("targets/test_quantized.py", "targets/test_device_map.py")
PARALLEL = "targets/two_processes.py"
KINDS = {
    "8bit": "bitsandbytes, 8 bits",
    "nf4": "bitsandbytes, 4 bits, NF4",
    "fp4-nested": "bitsandbytes, 4 bits, FP4, nested",
    "part": "`device_map`, some layers on disk",
    "loaded": "the same, loaded with `device_map`",
    "disk": "all weights on disk",
    "memory": "all weights offloaded to memory",
}

TEMPLATE = """# Support matrix

Made by `python -m tests.support_matrix` from the parameters and the record of the tests; another
test compares. "yes" stands where a test runs the combination, "refused" where a test demands the
error; an empty cell is not tested. Models are tiny, of random weights, on a CPU; the real ones that
are tested are SmolLM2-135M-Instruct and Gemma-3-270M. An architecture that is not listed may work:
what cannot is refused, and [`hf-spec verify`](measure.md) tells.

## Families

What becomes of every text and image-text class of transformers {version}, by the families that
users know: {classes} classes, which stand in {entries} places of `AutoModelForCausalLM` and
`AutoModelForImageTextToText`. A tiny model of each was made of the defaults of its config, and
prompts of text compared with plain `generate()`: the same tokens, greedy, float32, one prompt and
a ragged batch, or a sentence. Encoders that can be decoders have `is_decoder=True`. Nothing was
wrong (`tests/targets/test_sweep.py`, recorded in `tests/targets/sweep.json`).

{outcomes}
An asterisk: one prompt alone; padding is refused, or plain `generate()` itself takes none.

{known}
## Architectures and strategies

{number} architectures, greedy, float32: the tokens of plain `generate()`, on one sequence and on a
ragged batch with left padding (`tests/test_identity.py`). `none` drafts nothing and has a test of
its own.

{architectures}
*Packed*: all rows as one sequence, for models that take an attention function. *Rectangular*: one
line per row, padded to the longest of the step; keys and values are padded in neither.

## Image-text models

{number_of_families} families, greedy, float32: the tokens of plain `generate()`, on one prompt and
on a ragged batch of three, as chains and as trees (`tests/targets/test_image_text.py`). All
strategies were run on {strategies_on}. How: [images](supported-models.md#images).

{families}
## Speech

Whisper, greedy, float32: the tokens of its own `generate()` (`tests/targets/test_whisper.py`). How:
[Whisper](supported-models.md#whisper).

{speech}
## Recurrent and hybrid models

{hybrids} architectures with layers that keep a state instead of keys and values, greedy, float32:
chains and trees that are right now and then, on one sequence and on a ragged batch
(`tests/targets/test_hybrids.py`). Delta nets round differently in chunks and in steps, also in
plain `generate()`, so that for them it is "equal up to ties" of the two largest logits. The last
columns are the strategies with a draft model of the same kind.

{recurrent}
## Dtypes

Greedy output beside plain `generate()`, in half precision up to ties of the two largest logits
(`tests/targets/test_half_precision.py`).

{dtypes}
## Quantized, offloaded and distributed weights

A Llama on the CPU beside plain `generate()` of the same model: equal up to ties where it is
quantized, equal otherwise (`tests/targets`). Details and errors:
[supported models](supported-models.md).

{placements}
Two processes were also compared on {parallel}, with the first three of
these strategies.

## Refused

Of the classes above, before the first forward, with this sentence. Encoder-decoders that stand in
neither place are refused like theirs. What else is refused:
[supported models](supported-models.md).

{refused}
## Not tried

Of these classes no tiny model could be made, or plain `generate()` does not run on it.

{not_made}"""


def page() -> str:
    """The whole page."""
    others = [name for name in constant(PARALLEL, "ARCHITECTURES") if name != "llama"]
    return TEMPLATE.format(
        number=len(tiny_models.ARCHITECTURES),
        architectures=architectures(),
        number_of_families=len(image_cases.FAMILIES),
        strategies_on=" and ".join(map(code, test_image_text.REPRESENTATIVES)),
        families=families(),
        speech=speech(),
        hybrids=len(HYBRIDS),
        recurrent=recurrent(),
        dtypes=dtypes(),
        placements=placements(),
        parallel=", ".join(map(code, others)),
        refused=reasons(REFUSED),
        not_made=reasons(NOT_MADE),
        version=recorded_version(),
        classes=len(classes()),
        entries=len(entries()),
        outcomes=outcomes(),
        known=known(),
    )


def architectures() -> str:
    """Architecture x strategy, as the identity tests demand it."""
    rows = []
    for name in tiny_models.ARCHITECTURES:
        model = tiny_models.build(name)
        served = [tiny_models.is_served(name, strategy) for strategy in STRATEGIES]
        cells = ["yes" if yes else "refused" for yes in served]
        rows.append([code(name), type(model).__name__, *about(model), *cells])
    return table(["architecture", "class", "inputs", "attention", *map(code, STRATEGIES)], rows)


def recurrent() -> str:
    """Architectures with recurrent layers, and what is tested of each."""
    rows = []
    for name in HYBRIDS:
        model = hybrid_models.build(name)
        output = "equal up to ties" if name in DELTA_NETS else "equal"
        resumed = "refused" if not resumes(model) or name in PURE else ""
        resumed = resumed or ("yes" if name in test_hybrids.RESUMED else "")
        strategies = test_hybrids.STRATEGIES if name in test_hybrids.THREE else ()
        strategies = ("tree",) if name in test_hybrids.TREES_ALONE else strategies
        cells = ["yes" if strategy in strategies else "" for strategy in test_hybrids.STRATEGIES]
        rows.append([code(name), type(model).__name__, about(model)[0], output, resumed, *cells])
    head = ["architecture", "class", "inputs", "output", "`past_key_values`"]
    return table([*head, *map(code, test_hybrids.STRATEGIES)], rows)


def about(model: PreTrainedModel) -> tuple[str, str]:
    """Layout of the inputs, and what is special about the attention."""
    config = model.config.get_text_config()
    special = ["sliding window"] if getattr(config, "sliding_window", None) else []
    special += ["chunks"] if getattr(config, "attention_chunk_size", None) else []
    special += ["ALiBi"] if uses_alibi(model) else []
    return "packed" if takes_packed(model) else "rectangular", ", ".join(special)


def families() -> str:
    """Classes of image-text models, and the rows of the batch that they were run on."""
    rows = []
    for name, family in image_cases.FAMILIES.items():
        images = ", ".join(map(str, family.num_images))
        rows.append([code(name), family.model.__name__, "yes", "yes", images])
    return table(["family", "class", "text", "images", "images of each row"], rows)


def speech() -> str:
    """Whisper x strategy."""
    model = whisper_cases.build()
    tried = {config if isinstance(config, str) else config.strategy for config, _ in SPEECH}
    cells = ["refused" if name == "falcon" else "yes" for name in STRATEGIES]
    assert {name for name, cell in zip(STRATEGIES, cells, strict=True) if cell == "yes"} == tried
    rows = [[code("whisper"), type(model).__name__, about(model)[0], *cells]]
    return table(["architecture", "class", "inputs", *map(code, STRATEGIES)], rows)


def dtypes() -> str:
    """Dtype and architecture x strategy."""
    half: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, dtype, strategy in test_half_precision.CASES:
        half[str(dtype).removeprefix("torch."), code(name)].add(strategy)
    adapters = test_half_precision.test_adapters.pytestmark[0].args[1]
    half["bfloat16", code("llama")].update(adapters)
    rows = [["float32", "all above", "equal", *tested(STRATEGIES)]]
    rows += [[*key, "equal up to ties", *tested(half[key])] for key in half]
    return table(["dtype", "architecture", "output", *map(code, STRATEGIES)], rows)


def placements() -> str:
    """Where and how weights are kept x strategy."""
    rows = [
        [KINDS[kind], *tested(constant(file, "STRATEGIES"))]
        for file in KEPT_OTHERWISE
        for kind in constant(file, "KINDS")
    ]
    rows.append(['`tp_plan="auto"`, two processes', *tested(constant(PARALLEL, "STRATEGIES"))])
    return table(["weights", *map(code, STRATEGIES)], rows)


def outcomes() -> str:
    """How many classes came out how, and how many entries of the two mappings."""
    kinds = (IDENTICAL, REFUSED, WRONG, NOT_MADE)
    rows = [
        [what, *(str(count[kind]) for kind in kinds)]
        for what, count in zip(("classes", "places"), counts(record()), strict=True)
    ]
    return table(["", *kinds], rows)


def known() -> str:
    """Families that users know, and what became of their classes."""
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in FAMILIES}
    for kind, name in classes():
        seen = record()[name]
        star = "\\*" if seen.one == IDENTICAL != seen.ragged else ""
        found[family_of(kind)][seen.one].append(code(name) + star)
    head = ("same tokens", "refused", "not tried")
    return table(
        ["family", *head],
        [
            [family, *(", ".join(by[kind]) for kind in (IDENTICAL, REFUSED, NOT_MADE))]
            for family, by in found.items()
        ],
    )


def reasons(kind: str) -> str:
    """Classes of one outcome, each with the sentence that says why."""
    rows = [
        [name, each.why.replace("|", "\\|")]
        for name, each in sorted(record().items())
        if each.one == kind
    ]
    return table(["class", "why"], rows)


def tested(strategies: Collection[str]) -> list[str]:
    """The cells of a row."""
    return ["yes" if strategy in strategies else "" for strategy in STRATEGIES]


def constant(file: str, name: str) -> Any:
    """A constant of a test file, which need not be importable: bitsandbytes is optional."""
    for node in ast.parse((TESTS / file).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise AssertionError(f"{file} has no constant {name}")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(text: str) -> str:
    """Monospaced in Markdown."""
    return f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
