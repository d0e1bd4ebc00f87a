"""Options, clock, and record that the timing studies share."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.common.files import write_json
from hf_spec.common.machine import environment


def add_options(parser: ArgumentParser) -> None:
    """Add `--model`, `--dtype`, `--threads`, `--processor-time` and `--out`."""
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument(
        "--processor-time", action="store_true", help="count processor seconds, not those that pass"
    )
    parser.add_argument("--out", type=Path, help="JSON file")


def begin(options: Namespace) -> tuple[PreTrainedModel, Callable[[], float]]:
    """Set the number of threads; return the model and the clock."""
    if options.threads:
        torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
    return model, time.process_time if options.processor_time else time.perf_counter


def seconds_in_turn(
    forms: Mapping[str, Sequence[Callable[[Any], object]]],
    states: Sequence[Any],
    repeats: int,
    clock: Callable[[], float],
) -> dict[str, list[float]]:
    """Return the seconds of all runs of every form; a run calls each function with its states."""
    seconds: dict[str, list[float]] = {form: [] for form in forms}
    for _ in range(repeats):
        for form, products in forms.items():
            start = clock()
            for product, given in zip(products, states, strict=True):
                product(given)
            seconds[form].append(clock() - start)
    return seconds


def gone_on(out: Path | None, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the `records` in `out` of an earlier command with the same settings.

    Without such a file, the list is empty. If a setting differs, the command exits.
    """
    if out is None or not out.exists():
        return []
    earlier = json.loads(out.read_text("utf-8"))
    differing = [name for name, value in settings.items() if earlier[name] != value]
    if differing:
        raise SystemExit(
            f"{out} was made with another {', '.join(differing)}; choose another --out"
        )
    records: list[dict[str, Any]] = earlier["records"]
    return records


def shown(name: str) -> str:
    """Return a folder or Hub id for a record, without local paths."""
    return Path(name).name if Path(name).is_absolute() else name


def write_record(options: Namespace, content: dict[str, Any]) -> None:
    """Write the environment and clock followed by the measurements, if `--out` is given."""
    if options.out:
        facts = {
            "environment": environment(),
            "threads": torch.get_num_threads(),
            "processor_time": options.processor_time,
        }
        write_json(options.out, {**facts, **content})
