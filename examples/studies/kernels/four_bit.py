"""Time 4-bit linear layers by rows: bitsandbytes, our kernels, and a plain read of the weights.

Run `python -m examples.studies.kernels.four_bit --help` for the options. The layers have random
weights and the sizes of decoder layers of Qwen2.5-1.5B. The forms alternate on the same weights,
and their results are compared before they are timed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from bitsandbytes.nn import Linear4bit
from hf_spec_kernels import build, huge_pages
from torch import Tensor

from examples.studies import timing
from hf_spec.backend.cpu.four_bit import four_bit_forward, is_four_bit
from hf_spec.common.tables import Table

ROWS = (1, 4, 8, 16)
# Outputs and inputs: queries, keys, values, attention output, gate, up, down.
HIDDEN, KEYS, WIDE = 1536, 256, 8960
SIZES = (
    (HIDDEN, HIDDEN),
    (KEYS, HIDDEN),
    (KEYS, HIDDEN),
    (HIDDEN, HIDDEN),
    (WIDE, HIDDEN),
    (WIDE, HIDDEN),
    (HIDDEN, WIDE),
)
DTYPE = torch.bfloat16
# Largest relative difference (by norm) in the row-major layout, from rounding to bfloat16.
TOLERANCE = 5e-3
READ = "plain read"
# Options that are written to the record.
NAMES = ("num_layers", "nested", "processor", "huge_pages")

Form = Callable[[Any, Tensor], Any]
FORMS: dict[str, Form] = {"bitsandbytes": Linear4bit.forward, "hf_spec": four_bit_forward}
# Rows -> form -> seconds of every run over all layers.
Seconds = dict[int, dict[str, list[float]]]


@torch.no_grad()
def layers(sizes: Sequence[tuple[int, int]], nested: bool, row_major: bool) -> list[Any]:
    """Return NF4 layers after their first call, in which bitsandbytes repacks the weight."""
    torch.manual_seed(0)
    options = {"bias": False, "compute_dtype": DTYPE, "quant_type": "nf4"}
    made = []
    for outputs, inputs in sizes:
        layer = Linear4bit(inputs, outputs, compress_statistics=nested, **options)
        layer.support_avx512bf16_for_cpu &= not row_major
        layer = layer.to("cpu").eval()
        layer(torch.zeros(1, inputs, dtype=DTYPE))
        made.append(layer)
    return made


def bytes_of(layer: Any) -> int:
    """Return the bytes of codes and scales."""
    state = layer.weight.quant_state
    outer = state.state2.absmax.nbytes if state.nested else 0
    return int(layer.weight.data.nbytes + state.absmax.nbytes + outer)


def check(layer: Any, states: Tensor) -> None:
    """Check that our kernel computes the same as bitsandbytes, before it is timed."""
    expected, found = layer(states), four_bit_forward(layer, states)
    assert found is not None, "the kernel does not run this layer"
    off = float((found - expected).norm() / expected.norm())
    close = 0.0 if layer.support_avx512bf16_for_cpu else TOLERANCE
    assert off <= close, f"results differ by {off:.1e}"


def forms_of(model: Sequence[Any]) -> dict[str, list[Callable[[Tensor], Any]]]:
    """Return a function per layer for each form."""
    return {form: [partial(run, layer) for layer in model] for form, run in FORMS.items()}


@torch.no_grad()
def measure(
    model: Sequence[Any], rows: Sequence[int], repeats: int, clock: Callable[[], float]
) -> Seconds:
    """Return rows -> form -> seconds of every run over all layers."""
    seconds: Seconds = {}
    for count in rows:
        inputs = {n: torch.randn(count, n).to(DTYPE) for n in {one.in_features for one in model}}
        for layer in model:
            check(layer, inputs[layer.in_features])
        states = [inputs[layer.in_features] for layer in model]
        seconds[count] = timing.seconds_in_turn(forms_of(model), states, repeats, clock)
    return seconds


def read_seconds(nbytes: int, repeats: int, clock: Callable[[], float]) -> list[float]:
    """Return the seconds of summing `nbytes` bytes, per repeat."""
    block = torch.ones(nbytes // 4)
    runs = []
    for _ in range(repeats):
        start = clock()
        block.sum()
        runs.append(clock() - start)
    return runs


def table(seconds: Seconds, nbytes: int) -> str:
    """Return Markdown: minimum and median milliseconds, and bytes per second by the minimum."""
    lines = [[form, *(cell(nbytes, runs[form]) for runs in seconds.values())] for form in FORMS]
    return Table(["rows", *map(str, seconds)], lines).markdown()


def cell(nbytes: int, runs: list[float]) -> str:
    """Return the table cell of the runs of one form."""
    least = min(runs)
    return f"{least * 1e3:.1f} / {median(runs) * 1e3:.1f} ms, {nbytes / least / 1e9:.1f} GB/s"


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-layers", type=int, default=6, help="decoder layers")
    parser.add_argument("--nested", action="store_true", help="double quantization")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument("--huge-pages", action="store_true", help="move the weights to huge pages")
    parser.add_argument(
        "--processor-time", action="store_true", help="count processor seconds, not those that pass"
    )
    parser.add_argument(
        "--processor",
        help="use the row-major layout, and build our kernel for a processor by its name in GCC",
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.processor:
        build.FLAGS = tuple(flag.replace("native", options.processor) for flag in build.FLAGS)
    clock = time.process_time if options.processor_time else time.perf_counter
    model = layers(SIZES * options.num_layers, options.nested, bool(options.processor))
    assert all(map(is_four_bit, model)), "the kernel cannot be built"
    if options.huge_pages:
        huge_pages.move([layer.weight.data for layer in model])
    nbytes = sum(map(bytes_of, model))
    seconds = measure(model, options.rows, options.repeats, clock)
    read = read_seconds(nbytes, options.repeats, clock)
    print(table(seconds, nbytes))
    print(f"{READ}: {cell(nbytes, read)}")
    settings = {name: getattr(options, name) for name in NAMES}
    timing.write_record(options, {**settings, "bytes": nbytes, "seconds": seconds, READ: read})


if __name__ == "__main__":
    main()
