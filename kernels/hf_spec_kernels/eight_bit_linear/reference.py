"""References of the linear layers with 8-bit weights."""

from __future__ import annotations

from torch import Tensor

# Both factors have codes of 127 for 1.
PRODUCT_UNIT, WEIGHT_UNIT = 6.200124e-05, 7.874015718698502e-3


def weight_only_linear(states: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """Compute the linear layer; sums and scales are rounded to the dtype, then multiplied."""
    return (states.float() @ codes.float().T).to(states.dtype) * scales.to(states.dtype)


def dynamic_linear(
    states: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, threshold: float
) -> Tensor:
    """Compute the linear layer with quantized states, row by row as bitsandbytes does for one."""
    halves = states.half().float()
    outliers = halves.abs() >= threshold if threshold > 0 else halves.isnan()
    inner = halves.masked_fill(outliers, 0)
    largest = inner.abs().amax(-1, keepdim=True)
    whole = (inner * (127.0 / largest)).nan_to_num().round()
    # Whole numbers in float64 are exact.
    sums = (whole.double() @ codes.double().T).float()
    results = sums * (largest * scales) * PRODUCT_UNIT
    if bias is not None:
        results += bias
    results = results.to(states.dtype)
    weight = (codes * scales[:, None] * WEIGHT_UNIT).to(states.dtype)
    extra = states.float().masked_fill(~outliers, 0) @ weight.float().T
    return (results.float() + extra).to(states.dtype)
