"""Checks of models distributed over processes.

With tensor parallelism every process runs the same generation with its shard of each weight. The
size of a forward pass depends on the drafts, so processes that draft or sample differently would
deadlock. Inputs and random states are therefore compared before the first forward pass.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, distributed
from transformers import PreTrainedModel
from transformers.integrations import is_deepspeed_zero3_enabled

from hf_spec.common.errors import UnsupportedError

# Names of the layers whose outputs contain the keys of all heads.
KEY_LAYERS = ("k_proj", "qkv_proj", "query_key_value")


def check_sharding(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` for a sharding that speculative decoding does not support."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    name = type(model).__name__
    if _is_fully_sharded(model):
        raise UnsupportedError(
            f"{name} is sharded by FSDP or ZeRO-3: its processes run different inputs, so they "
            "would need different numbers of forward passes; generate with tp_plan='auto', or with "
            "the whole model in every process"
        )
    plan: Any = getattr(model.config, "distributed_config", None)
    if getattr(plan, "pp_size", 1) > 1:
        raise UnsupportedError(f"{name} uses pipeline parallelism; use tp_plan='auto'")
    size, config = tensor_parallel_size(model), model.config.get_text_config()
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    if size > 1 and (heads % size or kv_heads % size) and _cuts_heads(model):
        raise UnsupportedError(
            f"{name} has {heads} query heads and {kv_heads} key heads, which {size} processes "
            "cannot share evenly (plain generate() fails, too); choose another number of processes"
        )


def check_ranks(model: PreTrainedModel, input_ids: Tensor, do_sample: bool) -> None:
    """Raise `UnsupportedError` if tensor-parallel processes have other inputs or random states.

    Every process must call this.
    """
    size = tensor_parallel_size(model)
    if size == 1:
        return
    mesh: Any = next(p for p in model.parameters() if hasattr(p, "device_mesh")).device_mesh
    states = [torch.get_rng_state()] if do_sample else []
    if do_sample and input_ids.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(input_ids.device))
    digests = torch.tensor([_digest([input_ids]), _digest(states)], device=model.device)
    gathered = [torch.empty_like(digests) for _ in range(size)]
    distributed.all_gather(gathered, digests, group=mesh.get_group())
    inputs, random_states = torch.stack(gathered).T.tolist()
    if len(set(inputs)) > 1:
        raise UnsupportedError(
            "the processes of a tensor-parallel model got different input_ids; pass the same to "
            "every process"
        )
    if len(set(random_states)) > 1:
        raise UnsupportedError(
            "sampling with tensor parallelism needs the same random numbers in every process; call "
            "torch.manual_seed() with one seed in all of them before generate()"
        )


def tensor_parallel_size(model: PreTrainedModel) -> int:
    """Return the number of processes that the weights of `model` are sharded over."""
    return getattr(model, "tp_size", None) or 1


def _is_fully_sharded(model: PreTrainedModel) -> bool:
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (FSDPModule, FullyShardedDataParallel)
    return is_deepspeed_zero3_enabled() or any(isinstance(m, kinds) for m in model.modules())


def _cuts_heads(model: PreTrainedModel) -> bool:
    return any(
        name.split(".")[-2] in KEY_LAYERS and hasattr(parameter, "device_mesh")
        for name, parameter in model.named_parameters()
        if name.endswith(".weight")
    )


def _digest(tensors: list[Tensor]) -> int:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "big", signed=True)
