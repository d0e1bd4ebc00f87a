"""`kv_write` in Triton; each program copies the heads of some tokens."""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0913 - compile-time names are upper-case, pointers are many

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.dispatch import launches

OP = "kv_write"
# Elements per program.
TILE = 4096


@triton.jit
def _copy(source, target, mask, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy SIZE elements from and to each pair of pointers."""
    step = tl.arange(0, BLOCK)[None, :]
    both = mask[:, None] & (step < SIZE)
    tl.store(target[:, None] + step, tl.load(source[:, None] + step, mask=both), mask=both)


@triton.jit(do_not_specialize=["num_tokens"])
def kv_write_kernel(
    key_ptr, value_ptr, keys_ptr, values_ptr, slot_mapping_ptr,
    stride_key_t, stride_key_h, stride_value_t, stride_value_h,
    stride_keys_s, stride_keys_h, stride_keys_c,
    stride_values_s, stride_values_h, stride_values_c,
    num_tokens, num_heads,
    HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Copy rows; a row is one head of one token."""
    row = (tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    token, head = row // num_heads, row % num_heads
    inside = token < num_tokens
    slot = tl.load(slot_mapping_ptr + token, mask=inside, other=-1).to(tl.int64)
    entry = tl.load(slot_mapping_ptr + num_tokens + token, mask=inside, other=0).to(tl.int64)
    mask = slot >= 0
    source = key_ptr + token * stride_key_t + head * stride_key_h
    target = keys_ptr + slot * stride_keys_s + head * stride_keys_h + entry * stride_keys_c
    _copy(source, target, mask, HEAD, BLOCK_D)
    source = value_ptr + token * stride_value_t + head * stride_value_h
    target = values_ptr + slot * stride_values_s + head * stride_values_h + entry * stride_values_c
    _copy(source, target, mask, VALUE_HEAD, BLOCK_V)


def kv_write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """Launch the kernel; see the package's function."""
    num_tokens, num_heads, head_size = key.shape
    if not num_tokens:
        return
    block_d = triton.next_power_of_2(head_size)
    block_v = triton.next_power_of_2(value.shape[2])
    block_r = max(1, TILE // max(block_d, block_v))
    launches[OP] += 1
    kv_write_kernel[(triton.cdiv(num_tokens * num_heads, block_r),)](
        key, value, keys, values, slot_mapping,
        *key.stride()[:2], *value.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        num_tokens, num_heads,
        HEAD=head_size, VALUE_HEAD=value.shape[2],
        BLOCK_R=block_r, BLOCK_D=block_d, BLOCK_V=block_v,
    )  # fmt: skip
