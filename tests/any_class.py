"""Tiny random models of any class in transformers' auto mappings, built from its default config."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from tests.tiny_models import VOCAB

LAYERS = 4
# A larger model means that `SIZES` and `OWN` miss one of its size fields.
MOST_PARAMETERS = 20_000_000

# Reduced value -> config fields that get it, unless their default is smaller.
SIZES: dict[int, str] = {
    VOCAB: (
        "vocab_size vocab_size_per_layer_input encoder_hash_byte_group_vocab ngram_vocab_size_base"
    ),
    512: "max_position_embeddings n_positions n_ctx max_seq_len",
    64: (
        "intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim n_inner ffn_hidden_size "
        "dense_intermediate_size intermediate_size_mlp block_ff_dim mlp_dim index_topk "
        "attention_hidden_size mamba_d_ssm mamba_d_inner num_position_embeddings num_embeddings "
        "d_inner codebook_size"
    ),
    32: (
        "hidden_size d_model n_embd dim embed_dim embedding_size moe_intermediate_size "
        "shared_expert_intermediate_size moe_shared_expert_intermediate_size "
        "shared_intermediate_size expert_intermediate_size expert_ffn_hidden_size "
        "word_embed_proj_dim qkv_hidden_size lru_width out_hidden_size projection_dim output_dim "
        "vision_output_dim proj_hidden_size text_hidden_size vision_hidden_size "
        "encoder_hidden_size input_size abstractor_hidden_size output_proj_dims "
        "conformer_hidden_size projector_hidden_size vision_feature_dim image_size emb_dim "
        "hidden_size_global moe_hidden_size base_channels latent_channels ple_embed_dim hc_lowrank "
        "shared_experts_intermediate_size hidden_sizes adapter_in_dim image_token_embed_dim "
        "adapter_out_dim adapter_input_size"
    ),
    16: (
        "q_lora_rank kv_lora_rank o_lora_rank chunk_size mamba_chunk_size attention_chunk_size "
        "window_size qk_head_dim"
    ),
    8: (
        "head_dim global_head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim kv_channels "
        "lora_rank adapter_rank sliding_window attention_window_size local_attention_window "
        "mamba_d_state mamba_n_heads mamba_num_heads mamba_head_dim mamba_d_head mamba_headdim "
        "ssm_state_size state_size linear_key_head_dim linear_value_head_dim attention_head_dim "
        "hidden_size_per_layer_input laurel_rank index_head_dim patch_size query_pre_attn_scalar "
        "d_head"
    ),
    4: (
        "num_hidden_layers n_layer n_layers num_layers num_attention_heads n_head n_heads "
        "num_heads decoder_attention_heads encoder_attention_heads attention_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts rotary_dim mamba_dt_rank "
        "time_step_rank linear_num_value_heads num_linear_heads num_memory_heads index_n_heads "
        "mm_tokens_per_image num_query_tokens max_num_tiles compress_rate"
    ),
    2: (
        "decoder_layers encoder_layers depth num_key_value_heads num_kv_heads "
        "swa_num_key_value_heads num_global_key_value_heads num_experts_per_tok "
        "num_experts_per_token moe_topk moe_k top_k_experts top_k n_mamba_heads mamba_expand "
        "linear_num_key_heads altup_num_inputs o_groups hc_mult spatial_merge_size merge_size "
        "temporal_patch_size zero_expert_num depths heads_per_ngram split_ngram_parts"
    ),
    1: (
        "n_shared_experts n_group topk_group num_expert_group first_k_dense_replace mamba_n_groups "
        "n_groups mamba_ngroups num_hash_layers num_global_layers"
    ),
    0: "num_kv_shared_layers num_nextn_predict_layers mtp_num_hidden_layers num_mtp_layers",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# Special token ids within the small vocabulary.
TOKENS = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    **dict.fromkeys(("image_token_id", "image_token_index", "img_context_token_id"), 90),
    **dict.fromkeys(("video_token_id", "video_token_index"), 91),
    **dict.fromkeys(
        (
            "vision_start_token_id",
            "boi_token_id",
            "boi_token_index",
            "image_start_token_id",
            "video_start_token_id",
        ),
        92,
    ),
    **dict.fromkeys(
        (
            "vision_end_token_id",
            "eoi_token_id",
            "eoi_token_index",
            "image_end_token_id",
            "video_end_token_id",
        ),
        93,
    ),
    **dict.fromkeys(("audio_token_id", "audio_token_index"), 94),
    **dict.fromkeys(("boa_token_id", "boa_token_index"), 95),
    **dict.fromkeys(("eoa_token_id", "eoa_token_index"), 96),
}
# Values that override any default.
ALWAYS = {
    "pad_token_id": 0,
    # Makes encoders run as decoders, as `AutoModelForCausalLM` requires.
    "is_decoder": True,
    "initializer_range": 0.3,
    "init_std": 0.3,
    # In hybrid models every second layer is an attention layer.
    "attn_layer_indices": [1, 3],
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_CODES = {f"IMGIMG{letter}Z": 80 + i for i, letter in enumerate("ABCD")}
_VISUAL = {f"<|visual token {i:06d}|>": 80 + i for i in range(4)}
# Overrides by model type: sizes with class-specific constraints, missing defaults, and layer types
# that all real checkpoints have but the default config lacks.
OWN: dict[str, dict[str, Any]] = {
    "chameleon": {"vocabulary_map": {"<image>": 90, **_CODES}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"] * 2},
    "dots3_note_text": {
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 16,
        "swa_kv_lora_rank": 16,
        "swa_head_dim": 16,
        "swa_qk_nope_head_dim": 8,
        "swa_v_head_dim": 8,
    },
    "emu3": {"vocabulary_map": {"<image>": 90, "<|extra_200|>": 91, **_VISUAL}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {**_ROPE, "mrope_section": [1, 1, 2]}},
    "glm4v_moe_text": {
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0, "mrope_section": [2, 1, 1]}
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 1]],
        "downsample_rate": "2/4",
        "spatial_target_layers": [2],
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        },
    },
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"head_dim": 16},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse"] * 2},
    "mistral4": {"head_dim": 16},
    "molmo2_adapter": {"vision_feature_layer": [3, 2]},
    "musicgen_decoder": {"num_codebooks": 1},
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 92, "vision_end_token_id": 93},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 92, "vision_end_token_id": 93},
    "qwen4_exp_text": {
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
    },
    "reformer": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 8,
        "lsh_attn_chunk_length": 8,
        "local_attn_chunk_length": 8,
    },
    "rwkv": {"attention_hidden_size": 32},
    "step3p5": {"sliding_window": 8},
    "xlm": {"causal": True},
    "xlstm": {"embedding_dim": 32, "num_blocks": 4},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"n_mamba_heads": 8},
}
# Sizes that are None in some default configs.
NEEDED = (
    "head_dim",
    "num_key_value_heads",
    "num_experts_per_tok",
    "n_routed_experts",
    "n_shared_experts",
    "num_experts",
    "moe_intermediate_size",
    "top_k_experts",
)
KINDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
LEFT_OUT = (
    "model_type",
    "transformers_version",
    "architectures",
    "torch_dtype",
    "dtype",
    "_name_or_path",
    "auto_map",
    "per_layer_config",
)


class NotMadeError(Exception):
    """Raised if no tiny model of a class can be built, or plain `generate()` fails on it."""


def classes() -> list[tuple[str, str]]:
    """Return (model type, class) of all text and image-text models, each class once."""
    found: dict[str, str] = {}
    for kind, name in entries():
        found.setdefault(name, kind)
    return [(kind, name) for name, kind in found.items()]


def entries() -> list[tuple[str, str]]:
    """Return (model type, class) of all entries of the two mappings; some classes occur twice."""
    mappings = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return [
        (kind, name if isinstance(name, str) else name[0])
        for mapping in mappings
        for kind, name in mapping.items()
    ]


def build(kind: str, name: str) -> PreTrainedModel:
    """Return a random model of the named class.

    Raises:
        NotMadeError: if no small model can be built; the message has the reason.
    """
    try:
        made: Any = getattr(transformers, name)
        default = (made.config_class or CONFIG_MAPPING[kind])()
        config = type(default)(**_shrunk(default.to_dict()))
        with torch.device("meta"):
            size = sum(weight.numel() for weight in made._from_config(config).parameters())
        if size > MOST_PARAMETERS:
            raise NotMadeError(f"{size} parameters")
        torch.manual_seed(0)
        model: PreTrainedModel = made._from_config(config).eval().float()
    except Exception as error:
        # Configs and models raise many kinds of errors for unsupported sizes.
        raise NotMadeError(f"{type(error).__name__}: {error}") from error
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1 and weight.numel() > 1 and weight.std() == 0:
                # Norms and biases start as ones and zeros, which would hide mistakes.
                weight.add_(torch.randn_like(weight) * 0.1)
            elif weight.dim() >= 2 and weight.std() < 0.1:
                weight.normal_(0, 0.25)
    model.generation_config = transformers.GenerationConfig(
        pad_token_id=0, bos_token_id=1, decoder_start_token_id=1
    )
    return model


def _shrunk(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config with small values, including those of nested configs."""
    small: dict[str, Any] = {}
    for name, value in fields.items():
        # Per-layer or empty values are omitted: the class computes its own.
        many = isinstance(value, (list, dict)) and (len(value) >= 8 or not value)
        if name in ALWAYS:
            small[name] = ALWAYS[name]
        elif isinstance(value, dict) and "model_type" in value:
            small[name] = {**_shrunk(value), "model_type": value["model_type"]}
        elif name.startswith("rope_") and isinstance(value, dict):
            small[name] = _rope(value)
        elif name in KINDS and value:
            every = list(dict.fromkeys(value))
            small[name] = (every * LAYERS)[:LAYERS]
        elif name not in LEFT_OUT and not many:
            small[name] = _value(name, value)
    if "kv_lora_rank" in small and "num_key_value_heads" in small:
        small["num_key_value_heads"] = small["num_attention_heads"]
    return {**small, **OWN.get(fields.get("model_type", ""), {})}


def _value(name: str, value: Any) -> Any:
    if isinstance(value, list) and name in SMALL:
        return [_value(name, one) for one in value]
    if value is None and name in NEEDED:
        return SMALL[name]
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name.endswith("_token_id") or name in TOKENS:
        return TOKENS.get(name, 3)
    return min(value, SMALL.get(name, value))


def _rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of RoPE parameters, with small sections for M-RoPE."""
    small = copy.deepcopy(dict(parameters))
    for one in (small, *(part for part in small.values() if isinstance(part, dict))):
        if "rope_type" in one:
            one["mrope_section"] = [2, 1, 1]
    return small
