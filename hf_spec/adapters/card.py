"""Model cards of adapters: what they are, how to use them, and what was measured."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.errors import AssistantError
from hf_spec.files import written_whole

CARD_NAME = "README.md"

TITLES = {
    "draft": "A draft model for {}",
    "disco": "DISCO's stop classifier for {}",
    "falcon": "A Falcon head for {}",
    "sdsat": "Adaptive tokens (SDSAT) for {}",
}
# Options with numbers that were measured on texts kept apart from the training.
HELD_BACK = ("held_back", "validation")
# What a row of a benchmark's summary is about if it covers every task.
ALL_TASKS = "all"

TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

An adapter of method `{{ method }}` for the package hf-spec, which drafts tokens inside
`model.generate()`. The output stays the model's own, whatever is drafted.

```python
import hf_spec
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained({{ base }})
model.generate(**inputs, spec_strategy="{{ strategy }}", assistant={{ name }})
```

Or without the import, which runs the code in `custom_generate/`:

```python
model.generate(**inputs, custom_generate={{ name }}, trust_remote_code=True)
```
{% if held_back %}
## Held-back texts

| | |
|---|---|
{% for label, value in held_back %}| `{{ label }}` | {{ value }} |
{% endfor %}{% endif %}{% if speeds %}
## Speed

Ratios to plain `generate()` in the same run: the median over the prompts, the 20th and the 80th
percentile. tau is the number of accepted draft tokens per forward of the model.

| strategy | batch | speed | from | to | tau |
|---|---|---|---|---|---|
{% for row in speeds %}| {{ row | join(" | ") }} |
{% endfor %}{% if machine %}
{{ machine }}
{% endif %}{% endif %}{% if training %}
## Training

| option | value |
|---|---|
{% for label, value in training %}| `{{ label }}` | {{ value }} |
{% endfor %}{% endif %}"""


def write_card(
    folder: str | os.PathLike[str],
    *,
    results: Path | None = None,
    base_model: str | None = None,
    license: str | None = None,  # noqa: A002 - as it is called in the metadata
    datasets: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Write the model card of an adapter.

    Args:
        folder: of the adapter, from whose options the measured numbers and the training are taken.
        results: what `hf-spec bench --out` wrote, with speeds of the adapter or its strategy.
        base_model: Hub id of the base; by default the name that it had in training.
        license: of the weights, such as "apache-2.0"; not stated by default.
        datasets: Hub ids of the texts it was trained on.
        overwrite: whether a card that is there may be replaced.

    Returns:
        The path of the card.

    Raises:
        AssistantError: if the folder holds no adapter, a card is there already, or the results
            have nothing to say.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise AssistantError(f"{folder} is no folder; a card is written into that of an adapter")
    path = folder / CARD_NAME
    if path.exists() and not overwrite:
        raise AssistantError(
            f"{path} is there already, perhaps written by hand; pass overwrite=True to replace it"
        )
    adapter = load_adapter(folder)
    base = base_model or adapter.base.name
    data = ModelCardData(
        base_model=base,
        library_name="hf_spec",
        license=license,
        datasets=list(datasets) or None,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", adapter.method],
        base_model_relation="adapter",
    )
    found = {} if results is None else _read_results(Path(results))
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        title=TITLES[adapter.method].format(base),
        method=adapter.method,
        strategy=adapter.strategy,
        base=json.dumps(base),
        name=json.dumps(folder.resolve().name),
        held_back=list(_held_back(adapter)),
        speeds=_speeds(found, adapter, folder.resolve().name) if found else [],
        machine=", ".join(f"{key} {value}" for key, value in found.get("environment", {}).items()),
        training=list(_numbers(adapter.options.get("training"))),
    )
    with written_whole(path) as part:
        part.write_text(str(card), encoding="utf-8")
    return path


def _held_back(adapter: SpecAdapter) -> Iterator[tuple[str, str]]:
    for name in HELD_BACK:
        yield from _numbers(adapter.options.get(name))


def _numbers(values: Any) -> Iterator[tuple[str, str]]:
    """The single values of a JSON object, as text; lists are too long for a table."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, float):
            yield name, f"{value:.4g}"
        elif isinstance(value, (bool, int, str)):
            yield name, str(value).replace("|", "\\|").replace("\n", " ")
        elif isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", text) for inner, text in _numbers(value))


def _read_results(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [row for row in found["summary"] if row["task"] == ALL_TASKS]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AssistantError(f"{path} holds no results of `hf-spec bench`: {error!r}") from error
    return {**found, "summary": rows}


def _speeds(found: Mapping[str, Any], adapter: SpecAdapter, name: str) -> list[list[str]]:
    """Rows of the table: those that name the adapter or, without any, those of its strategy."""
    contenders = {row["contender"] for row in found["summary"]}
    named = {one for one in contenders if one.rpartition("@")[2] == name}
    named = named or {one for one in contenders if one == adapter.strategy}
    if not named:
        raise AssistantError(
            f"the results have nothing of {name!r} or spec_strategy={adapter.strategy!r}; they "
            f"have {', '.join(sorted(contenders)) or 'nothing'}"
        )
    rows = []
    for row in found["summary"]:
        if row["contender"] in named:
            ratios = [f"{row[key]:.2f}" for key in ("ratio", "ratio_p20", "ratio_p80")]
            tau = row.get("tau")
            shown = "" if tau is None else f"{tau:.2f}"
            rows.append([f"`{row['contender']}`", str(row.get("batch_size", 1)), *ratios, shown])
    return rows
