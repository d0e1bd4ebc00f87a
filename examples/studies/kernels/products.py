"""Time the linear layers of a model by rows: F.linear, packed weights of oneDNN, and our kernels.

Run `python -m examples.studies.kernels.products --help` for the options. The forms alternate on the
same weights, and their results are compared before they are timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from examples.studies import timing
from hf_spec.backend.cpu.packed_gemm import ONEDNN, OWN, ROUNDED, Form, obstacle
from hf_spec.common.tables import Table

ROWS = (1, 2, 4, 8, 12, 16, 24, 48, 200)
DTYPES = (torch.float32, torch.bfloat16)
# Largest relative difference between forms, by norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
ROUNDED_TOLERANCE = 1e-2

Product = Callable[[Tensor], Tensor]
# dtype -> rows -> form -> seconds of every run.
Seconds = dict[str, dict[int, dict[str, list[float]]]]


def products_of(weights: Sequence[Tensor]) -> dict[str, list[Product]]:
    """Return form -> a function per weight that multiplies states by it."""

    def packed_by(form: Form, weight: Tensor) -> Product:
        packed = form.pack(weight)
        return lambda states: form.gemm(states, packed)

    forms: dict[str, list[Product]]
    forms = {"F.linear": [partial(F.linear, weight=weight) for weight in weights]}
    for form in (ONEDNN, OWN):
        if obstacle(form, weights[0].dtype) is None:
            forms[form.name] = [packed_by(form, weight) for weight in weights]
    if OWN.name in forms and weights[0].dtype == torch.float32:
        forms[ROUNDED.name] = [packed_by(ROUNDED, weight) for weight in weights]
    return forms


@torch.no_grad()
def measure(
    weights: Sequence[Tensor], rows: Sequence[int], repeats: int, clock: Callable[[], float]
) -> Seconds:
    """Return the seconds of every run of every form over all weights."""
    found: Seconds = {}
    for dtype in DTYPES:
        mine = [weight.to(dtype) for weight in weights]
        forms = products_of(mine)
        seconds: dict[int, dict[str, list[float]]] = {}
        for count in rows:
            inputs = {w: torch.randn(1, count, w).to(dtype) for w in {one.shape[1] for one in mine}}
            states = [inputs[one.shape[1]] for one in mine]
            check(dtype, {form: products[0](states[0]) for form, products in forms.items()})
            seconds[count] = timing.seconds_in_turn(forms, states, repeats, clock)
        found[str(dtype)] = seconds
    return found


def check(dtype: torch.dtype, results: Mapping[str, Tensor]) -> None:
    """Check that all forms compute the same, before they are timed."""
    (_, expected), *others = results.items()
    for form, other in others:
        off = float((other - expected).norm() / expected.norm())
        close = ROUNDED_TOLERANCE if form == ROUNDED.name else TOLERANCE[dtype]
        assert off < close, f"products in {dtype} differ by {off:.1e}"


def table(seconds: Seconds) -> str:
    """Return Markdown: minimum and median milliseconds."""
    by_rows = next(iter(seconds.values()))
    lines = [
        [dtype.removeprefix("torch."), form]
        + [
            f"{min(runs[form]) * 1e3:.1f} / {median(runs[form]) * 1e3:.1f}"
            for runs in mine.values()
        ]
        for dtype, mine in seconds.items()
        for form in next(iter(mine.values()))
    ]
    return Table(["dtype", "rows", *map(str, by_rows)], lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    weights = [one.weight.detach() for one in model.modules() if isinstance(one, nn.Linear)]
    seconds = measure(weights, options.rows, options.repeats, clock)
    print(table(seconds))
    timing.write_record(options, {"seconds": seconds})


if __name__ == "__main__":
    main()
