"""Model cards of adapters: description, usage and measured figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_spec.adapters.adapter import Adapter, is_hub_id, save_adapter
from hf_spec.common.errors import AssistantError
from hf_spec.common.files import atomic_write
from hf_spec.common.installing import WHERE, install_command

CARD_NAME = "README.md"
# Marks generated cards; a card without it was written by hand.
GENERATED = "<!-- Written by hf_spec, which replaces it. To keep changes, delete this line. -->"
TASK = "text-generation"

# Options with figures on held-out texts.
HELD_OUT = ("held_back", "validation")
# Task of the rows of a benchmark's summary that cover every task.
ALL_TASKS = "all"

TEMPLATE = """---
{{ card_data }}
---

{{ generated }}

# {{ title }}

An adapter of method `{{ method }}` for the package hf-spec, which drafts tokens inside
`model.generate()`. The output stays the model's own, whatever is drafted.

## Install

{{ where }}:

```bash
{{ install }}
```

## Use

```python
import hf_spec  # adds spec_strategy= and assistant= to generate()
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({{ base }})
tokenizer = AutoTokenizer.from_pretrained({{ base }})
inputs = tokenizer("Once upon a time", return_tensors="pt")
adapter = {{ name }}  # the path of this folder, or its id on the Hub
model.generate(**inputs, spec_strategy="{{ strategy }}", assistant=adapter, max_new_tokens=64)
```

Or without the import, which runs the code in `custom_generate/`:

```python
model.generate(**inputs, custom_generate=adapter, trust_remote_code=True)
```
{% if held_back %}
## Held-out texts

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


def save_with_card(folder: Path, adapter: Adapter) -> None:
    """Write an adapter and its model card to `folder`; keep a card that was written by hand."""
    save_adapter(folder, adapter)
    path = folder / CARD_NAME
    if not path.exists() or _is_generated(path):
        write_card(replace(adapter, folder=folder, repo_id=None))


def write_card(
    adapter: Adapter,
    *,
    results: Path | None = None,
    base_model: str | None = None,
    license: str | None = None,  # noqa: A002 - as it is called in the metadata
    datasets: Sequence[str] = (),
    overwrite: bool = False,
) -> Path:
    """Write the model card of an adapter into its folder; return the card's path.

    A generated card is replaced; its base, license and data sets are kept unless others are passed.
    Raises `AssistantError` if the adapter has no folder, or the results do not contain it.

    Args:
        adapter: loaded from the folder; measured figures and the training are in its options.
        results: file of `hf-spec bench --out` with speeds of the adapter or its strategy.
        base_model: Hub id of the base. Default: its name in training.
        license: license of the weights, such as "apache-2.0". Default: none.
        datasets: Hub ids of the texts that it was trained on.
        overwrite: replace a card that was written by hand, which otherwise raises.
    """
    path = adapter.own_folder / CARD_NAME
    stated = ModelCardData()
    if path.exists() and _is_generated(path):
        stated = ModelCard.load(path, ignore_metadata_errors=True).data
    elif path.exists() and not overwrite:
        raise AssistantError(
            f"{path} was written by hand; overwrite=True (--overwrite) replaces it"
        )
    method, name = adapter.record, adapter.own_folder.resolve().name
    base = str(base_model or stated.base_model or adapter.base.name)
    bench = {} if results is None else _read_results(Path(results), adapter, name)
    speeds = bench.get("summary", [])
    held_out = [pair for kind in HELD_OUT for pair in _flat(adapter.options.get(kind))]
    metrics = [*_held_out_metrics(adapter.method, held_out), *map(_speed_metric, speeds)]
    data = ModelCardData(
        # The Hub rejects names that are not ids.
        base_model=base if is_hub_id(base) else None,
        library_name="hf_spec",
        license=license or stated.license,
        datasets=list(datasets) or stated.datasets,
        pipeline_tag=TASK,
        tags=["speculative-decoding", method.name],
        base_model_relation="adapter",
        model_name=name if metrics else None,
        eval_results=metrics or None,
    )
    card = ModelCard.from_template(
        data,
        template_str=TEMPLATE,
        generated=GENERATED,
        title=method.title.format(base),
        method=method.name,
        strategy=method.strategy,
        where=WHERE.capitalize(),
        install=install_command(),
        base=json.dumps(base),
        name=json.dumps(name),
        held_back=[(label, _cell(value)) for label, value in held_out],
        speeds=[_speed_cells(row) for row in speeds],
        machine=", ".join(f"{key} {value}" for key, value in bench.get("environment", {}).items()),
        training=[(label, _cell(v)) for label, v in _flat(adapter.options.get("training"))],
    )
    with atomic_write(path) as part:
        part.write_text(str(card), encoding="utf-8")
    return path


def _is_generated(path: Path) -> bool:
    return GENERATED in path.read_text(encoding="utf-8", errors="replace")


def _flat(values: Any) -> Iterator[tuple[str, Any]]:
    """Yield the scalar values of a nested JSON object by dotted name, without lists."""
    if not isinstance(values, Mapping):
        return
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from ((f"{name}.{inner}", scalar) for inner, scalar in _flat(value))
        elif isinstance(value, (bool, int, float, str)):
            yield name, value


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")


def _held_out_metrics(method: str, held_out: Iterable[tuple[str, Any]]) -> Iterator[EvalResult]:
    """Yield the figures of the adapter for the Hub, without those of the rules beside it."""
    prefix = f"rules.{method}."
    for label, value in held_out:
        name = label.removeprefix(prefix)
        if isinstance(value, float) and (name != label or "." not in label):
            yield _metric("held-out", "held-out answers of the base model", name, name, value)


def _speed_metric(row: Mapping[str, Any]) -> EvalResult:
    name = f"speed relative to plain generate(), {row['contender']}, batch {row['batch_size']}"
    return _metric("hf-spec-bench", "prompts of hf-spec bench", "speedup", name, row["ratio"])


def _metric(dataset: str, dataset_name: str, kind: str, name: str, value: float) -> EvalResult:
    rounded = float(f"{value:.4g}")
    return EvalResult(TASK, dataset, dataset_name, kind, rounded, metric_name=name)


def _read_results(path: Path, adapter: Adapter, name: str) -> dict[str, Any]:
    """Return bench results with the rows of the adapter, or else those of its strategy."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
        rows = [{"batch_size": 1, **row} for row in results["summary"] if row["task"] == ALL_TASKS]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise AssistantError(f"{path} holds no results of `hf-spec bench`: {error!r}") from error
    contenders = {row["contender"] for row in rows}
    named = {entry for entry in contenders if entry.rpartition("@")[2] == name}
    named = named or contenders & {adapter.strategy}
    if not named:
        raise AssistantError(
            f"the results have no rows of {name!r} or spec_strategy={adapter.strategy!r}; they "
            f"have {', '.join(sorted(contenders)) or 'none'}"
        )
    return {**results, "summary": [row for row in rows if row["contender"] in named]}


def _speed_cells(row: Mapping[str, Any]) -> list[str]:
    figures = [row.get(name) for name in ("ratio", "ratio_p20", "ratio_p80", "tau")]
    shown = ("" if figure is None else f"{figure:.2f}" for figure in figures)
    return [f"`{row['contender']}`", str(row["batch_size"]), *shown]
