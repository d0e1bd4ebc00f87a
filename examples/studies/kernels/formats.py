"""Time linear layers by weight format and rows: bytes of weights per second, and of a plain read.

Run `python -m examples.studies.kernels.formats --help` for the options. The layers have random
weights and the sizes of decoder layers of Qwen2.5-1.5B. All formats have about the same number of
bytes, so that none fits into a cache that the others exceed. The forms of a format alternate on the
same weights.
"""

from __future__ import annotations

import argparse
import copy
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.nn import Linear8bitLt
from hf_spec_kernels.eight_bit_linear import weight_only_linear
from torch import Tensor

from examples.studies import timing
from examples.studies.kernels.four_bit import (
    READ,
    ROWS,
    SIZES,
    bytes_of,
    forms_of,
    layers,
    read_seconds,
)
from examples.studies.kernels.products import products_of
from hf_spec.backend.cpu.eight_bit import eight_bit_forward
from hf_spec.common.tables import Table

MEGABYTES = 400
BFLOAT16 = torch.bfloat16

Product = Callable[[Tensor], Any]
# Form -> a function per weight that multiplies states by it.
Forms = dict[str, list[Product]]


def dense(dtype: torch.dtype, decoder_layers: int) -> tuple[Forms, int]:
    """Return matmuls of PyTorch, oneDNN, and hf_spec with weights of a dtype, and their bytes."""
    weights = [torch.randn(size).to(dtype) for size in SIZES * decoder_layers]
    forms = {name: run for name, run in products_of(weights).items() if "round" not in name}
    return forms, sum(weight.nbytes for weight in weights)


def eight_bit(decoder_layers: int) -> tuple[Forms, int]:
    """Return matmuls of bfloat16 states and int8 weights with a scale per output, as in torchao."""
    sizes = SIZES * decoder_layers
    codes = [torch.randint(-127, 128, size, dtype=torch.int8) for size in sizes]
    scales = [torch.rand(len(each)) for each in codes]

    def torchao(states: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (states @ weight.t().to(states.dtype)) * scale.to(states.dtype)

    def pytorch(states: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(states, weight, scale)

    pairs = list(zip(codes, scales, strict=True))
    forms: Forms = {
        "torchao": [partial(torchao, weight=c, scale=s) for c, s in pairs],
        "_weight_int8pack_mm": [partial(pytorch, weight=c, scale=s.to(BFLOAT16)) for c, s in pairs],
        "hf_spec": [partial(weight_only_linear, codes=c, scales=s) for c, s in pairs],
    }
    return forms, sum(c.nbytes + s.nbytes for c, s in pairs)


def dynamic(decoder_layers: int) -> tuple[Forms, int]:
    """Return forms of `Linear8bitLt`, which also quantizes the states, and its bytes."""
    made = []
    for outputs, inputs in SIZES:
        options = {"bias": False, "has_fp16_weights": False, "threshold": 6.0}
        layer = Linear8bitLt(inputs, outputs, **options).to("cpu").eval()
        layer(torch.zeros(1, inputs, dtype=BFLOAT16))
        made.append(layer)
    made = [copy.deepcopy(layer) for _ in range(decoder_layers) for layer in made]
    forms: Forms = {
        "bitsandbytes": list(made),
        "hf_spec": [partial(eight_bit_forward, layer) for layer in made],
    }
    return forms, sum(layer.state.CB.nbytes + layer.state.SCB.nbytes for layer in made)


def four_bit(decoder_layers: int) -> tuple[Forms, int]:
    """Return matmuls with bitsandbytes' NF4 and PyTorch's int4 of the same block size."""
    once = layers(SIZES, nested=False, row_major=False)
    made = [copy.deepcopy(layer) for _ in range(decoder_layers) for layer in once]
    forms: Forms = forms_of(made)
    block = 64
    packed = []
    for outputs, inputs in SIZES * decoder_layers:
        codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.int32)
        scales = torch.rand(inputs // block, outputs, 2).to(BFLOAT16)
        packed.append((torch._convert_weight_to_int4pack_for_cpu(codes, 2), scales))

    def pytorch(states: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(states, weight, block, scale)

    forms["_weight_int4pack_mm"] = [partial(pytorch, weight=w, scale=s) for w, s in packed]
    return forms, sum(map(bytes_of, made))


# Format -> bits per weight, dtype of the states, and the function that builds its forms.
FORMATS: dict[str, tuple[int, torch.dtype, Callable[[int], tuple[Forms, int]]]] = {
    "float32": (32, torch.float32, partial(dense, torch.float32)),
    "bfloat16": (16, BFLOAT16, partial(dense, BFLOAT16)),
    "int8, weights only": (8, BFLOAT16, eight_bit),
    "int8, Linear8bitLt": (8, BFLOAT16, dynamic),
    "NF4": (4, BFLOAT16, four_bit),
}


@torch.no_grad()
def measure(
    formats: Sequence[str], repeats: int, megabytes: int, clock: Callable[[], float]
) -> dict[str, Any]:
    """Return bytes and seconds of all runs by format, rows, and form."""
    elements = sum(outputs * inputs for outputs, inputs in SIZES)
    found: dict[str, Any] = {}
    for name in formats:
        bits, dtype, make = FORMATS[name]
        count = max(1, round(megabytes * 8e6 / bits / elements))
        forms, nbytes = make(count)
        seconds: dict[int, dict[str, list[float]]] = {}
        for rows in ROWS:
            inputs = {n: torch.randn(rows, n).to(dtype) for n in {size[1] for size in SIZES}}
            states = [inputs[size[1]] for size in SIZES * count]
            seconds[rows] = timing.seconds_in_turn(forms, states, repeats, clock)
        read = read_seconds(nbytes, repeats, clock)
        found[name] = {"decoder_layers": count, "bytes": nbytes, "seconds": seconds, READ: read}
    return found


def table(found: dict[str, Any]) -> str:
    """Return Markdown: gigabytes of weights per second, by the minimum time."""
    lines = []
    for name, entry in found.items():
        read = f"{entry['bytes'] / min(entry[READ]) / 1e9:.1f}"
        for form in entry["seconds"][ROWS[0]]:
            speeds = (entry["bytes"] / min(runs[form]) / 1e9 for runs in entry["seconds"].values())
            lines.append([name, form, *(f"{speed:.1f}" for speed in speeds), read])
    return Table(["weights", "rows", *map(str, ROWS), READ], lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--format", action="append", choices=list(FORMATS), help="default: all")
    parser.add_argument("--megabytes", type=int, default=MEGABYTES, help="of weights per format")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    parser.add_argument(
        "--processor-time", action="store_true", help="count processor seconds, not those that pass"
    )
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args(argv)
    # 8-bit layers log a warning about cast inputs at every call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    if options.threads:
        torch.set_num_threads(options.threads)
    clock = time.process_time if options.processor_time else time.perf_counter
    found = measure(options.format or list(FORMATS), options.repeats, options.megabytes, clock)
    print(table(found))
    timing.write_record(options, {"formats": found})


if __name__ == "__main__":
    main()
