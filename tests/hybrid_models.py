"""Tiny random float32 models with recurrent layers, and speculation with partly correct drafts."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from hf_spec.generation.one_call import generate_with
from tests.partly_right import PartlyRight
from tests.tiny_models import LLAMA_LIKE, VOCAB, left_padded, shared

_BASE: dict[str, Any] = {**LLAMA_LIKE, "num_hidden_layers": 4, "max_position_embeddings": 512}
_FULL_HEADS = {**_BASE, "num_key_value_heads": 4}
_LINEAR = {"layer_types": ["linear_attention"] * 2 + ["full_attention", "linear_attention"]}
_CONV = {"layer_types": ["conv", "conv", "full_attention", "conv"]}
_SHARED = {"layers_block_type": ["linear_attention", "hybrid"] * 2}
_MIXED = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention"]
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "head_dim": 8,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL_EXPERTS = {"moe_intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
_LATENT = {
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_MAMBA_2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_PURE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "state_size": 8,
    "num_hidden_layers": 3,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}

# Config class and its options.
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_BASE, **_DELTA, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", {**_BASE, **_DELTA, **_LINEAR}),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {**_BASE, **_DELTA, **_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", {**_BASE, **_DELTA, **_LINEAR, "linear_num_key_heads": 4}),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **_FULL_HEADS,
            **_LINEAR,
            **_LATENT,
            **_LOCAL_EXPERTS,
            "linear_head_dim": 8,
            "linear_num_heads": 4,
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **_FULL_HEADS,
            **_LINEAR,
            **_LATENT,
            **_LOCAL_EXPERTS,
            "q_lora_rank": 16,
            "head_dim": 8,
            "n_group": 1,
            "topk_group": 1,
            "num_mtp_layers": 0,
        },
    ),
    "lfm2": ("Lfm2Config", {**_BASE, **_CONV, "conv_L_cache": 3}),
    "lfm2_moe": ("Lfm2MoeConfig", {**_BASE, **_CONV, **_EXPERTS, "num_dense_layers": 1}),
    "lfm3": ("Lfm3Config", {**_BASE, **_CONV}),
    "bamba": ("BambaConfig", {**_BASE, **_MAMBA_2, "attn_layer_indices": [2]}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_BASE,
            **_MAMBA_2,
            **_LINEAR,
            "shared_intermediate_size": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "position_embedding_type": "nope",
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        {
            **{key: value for key, value in _BASE.items() if key != "num_hidden_layers"},
            "head_dim": 8,
            "layers_block_type": _MIXED,
            "ssm_state_size": 8,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {**_BASE, **_MAMBA_2, "num_hidden_layers": 2, "mamba_d_ssm": 64, "head_dim": 8},
    ),
    "zamba2": (
        "Zamba2Config",
        {
            **_FULL_HEADS,
            **_SHARED,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "mamba_ngroups": 1,
            "chunk_size": 16,
            "num_mem_blocks": 1,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        {**_PURE, "num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 16},
    ),
    "jamba": (
        "JambaConfig",
        {
            **_BASE,
            "attn_layer_period": 3,
            "attn_layer_offset": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "num_experts": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
        },
    ),
    "zamba": (
        "ZambaConfig",
        {
            **_FULL_HEADS,
            **_SHARED,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_dt_rank": 4,
            "n_mamba_heads": 2,
        },
    ),
    "mamba": ("MambaConfig", _PURE),
    "falcon_mamba": ("FalconMambaConfig", _PURE),
}

# Architectures that the installed transformers has.
HYBRIDS = tuple(name for name, (kind, _) in _CONFIGS.items() if hasattr(T, kind))
# Their chunked kernels round differently from single steps: outputs are equal up to ties.
DELTA_NETS = {
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "olmo_hybrid",
    "kimi_linear",
    "bailing_hybrid",
}
# Their scan discards the previous state in a call with several tokens.
MAMBA_1 = {"jamba", "zamba", "mamba", "falcon_mamba"}
# Models that have only recurrent layers.
PURE = {"mamba", "mamba2", "falcon_mamba"}


@shared
def build(name: str, **changes: Any) -> PreTrainedModel:
    """Return a random model of the named architecture, cached per session; do not change it."""
    kind, options = _CONFIGS[name]
    config: PreTrainedConfig = getattr(T, kind)(**{**options, **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _make_lively_inplace(key, parameter)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def _make_lively_inplace(key: str, parameter: Tensor) -> None:
    """Randomize constant and very small weights, which hide mistakes and yield a single token."""
    if parameter.dim() == 1 and parameter.numel() > 1 and parameter.std() == 0:
        parameter.add_(torch.randn_like(parameter) * 0.1)
    if "dt_bias" in key or "dt_proj.bias" in key:
        parameter.copy_(torch.randn_like(parameter) * 0.5 - 1)
    elif key.endswith(("conv1d.bias", "conv.bias")):
        parameter.copy_(torch.randn_like(parameter) * 0.3)
    elif parameter.dim() == 3 and "conv" in key:
        parameter.copy_(torch.randn_like(parameter) * 0.5)
    elif parameter.dim() in (2, 3) and parameter.std() < 0.05:
        parameter.normal_(0, 0.25)


@cache
def noisy_copy(name: str) -> PreTrainedModel:
    """Return a draft model that often agrees with the named one."""
    kind, options = _CONFIGS[name]
    draft = AutoModelForCausalLM.from_config(getattr(T, kind)(**options)).eval().float()
    draft.load_state_dict(build(name).state_dict())
    torch.manual_seed(9)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.numel() > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * 0.03)
    return draft


def inputs(lengths: tuple[int, ...]) -> dict[str, Tensor]:
    """Return prompts of random tokens, padded on the left."""
    generator = torch.Generator().manual_seed(5)
    return left_padded([torch.randint(3, VOCAB, (n,), generator=generator) for n in lengths])


def speculate(
    model: PreTrainedModel, given: dict[str, Tensor], plain: Tensor, branches: bool
) -> Any:
    """Return greedy output with a `PartlyRight` drafter, as long as the plain output."""
    width = given["input_ids"].shape[1]
    answers = plain[:, width:].tolist()

    def decode(model: PreTrainedModel, input_ids: Tensor, **prepared: Any) -> Any:
        return generate_with(PartlyRight(answers, branches), model, input_ids, **prepared)

    return model.generate(
        **given,
        max_new_tokens=len(answers[0]),
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=decode,
    )
