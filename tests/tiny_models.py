"""Tiny random models of many architectures, float32, with a vocabulary of 97 tokens."""

from __future__ import annotations

from functools import cache

import torch
import transformers as T
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

VOCAB = 97
WINDOW = 8

_LLAMA_LIKE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
_GPT_LIKE = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.3,
}
_FALCON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "initializer_range": 0.3,
}


def _configs() -> dict[str, PreTrainedConfig]:
    base = _LLAMA_LIKE
    return {
        "llama": T.LlamaConfig(**base),
        "qwen2": T.Qwen2Config(**base),
        "qwen2_sliding": T.Qwen2Config(
            **base, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
        ),
        "qwen3": T.Qwen3Config(**base, head_dim=8),
        "mistral": T.MistralConfig(**base, sliding_window=None),
        "mistral_sliding": T.MistralConfig(**base, sliding_window=WINDOW),
        "gemma": T.GemmaConfig(**base, head_dim=8),
        "gemma2": T.Gemma2Config(
            **base, head_dim=8, sliding_window=WINDOW, query_pre_attn_scalar=8
        ),
        "gemma3": T.Gemma3TextConfig(
            **base,
            head_dim=8,
            sliding_window=WINDOW,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
        "phi3": T.Phi3Config(**base),
        "opt": T.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=32,
            pad_token_id=0,
            init_std=0.3,
        ),
        "gpt2": T.GPT2Config(**_GPT_LIKE),
        "gpt_neox": T.GPTNeoXConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.3,
        ),
        "gpt_bigcode_mqa": T.GPTBigCodeConfig(**_GPT_LIKE, multi_query=True),
        "gpt_bigcode_mha": T.GPTBigCodeConfig(**_GPT_LIKE, multi_query=False),
        "starcoder2": T.Starcoder2Config(**base, sliding_window=None),
        "falcon_gqa": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=True,
            num_kv_heads=2,
            alibi=False,
            bias=False,
            parallel_attn=True,
        ),
        "falcon_mqa": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=False,
            multi_query=True,
            alibi=False,
            bias=False,
            parallel_attn=True,
        ),
        "falcon_alibi": T.FalconConfig(
            **_FALCON,
            new_decoder_architecture=False,
            multi_query=False,
            alibi=True,
            bias=True,
            parallel_attn=False,
        ),
        "bloom": T.BloomConfig(
            vocab_size=VOCAB, hidden_size=32, n_layer=3, n_head=4, initializer_range=0.3
        ),
        "gpt_oss": T.GptOssConfig(
            **base,
            head_dim=8,
            sliding_window=WINDOW,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    }


ARCHITECTURES = sorted(_configs())


@cache
def build(name: str, seed: int = 0) -> PreTrainedModel:
    """A random model of the named architecture, made once per session; do not change it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_configs()[name]).eval()
    with torch.no_grad():
        # Norms and biases start as ones and zeros, which would hide mistakes.
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def repetitive_prompt(length: int = 21, period: int = 7, seed: int = 1) -> torch.Tensor:
    """(1, length) int64 prompt in which lookup finds matches."""
    generator = torch.Generator().manual_seed(seed)
    pattern = torch.randint(3, VOCAB, (1, period), generator=generator)
    return pattern.repeat(1, length // period + 1)[:, :length]


def ragged_batch(lengths: tuple[int, ...] = (12, 9, 5, 11, 3), seed: int = 2) -> dict:
    """`input_ids` and `attention_mask` of prompts of the given lengths, padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths)
    input_ids = torch.zeros(len(lengths), width, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        pattern = torch.randint(3, VOCAB, (3,), generator=generator).repeat(width)[:length]
        input_ids[row, width - length :] = pattern
        mask[row, width - length :] = 1
    return {"input_ids": input_ids, "attention_mask": mask}
