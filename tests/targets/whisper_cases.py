"""Tiny random Whisper models, sound for them, and draft models.

Tokens are ordered as in Whisper: text, the end, the start, "no timestamps", timestamps.
"""

from __future__ import annotations

from functools import cache

import torch
import transformers as T
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec
from tests.tiny_models import VOCAB

EOS, START, NO_TIMESTAMPS = 70, 71, 72
BINS = 8
# Frames of sound that the encoder reads at once: two for each of its positions.
FRAMES = 40
POSITIONS = 224


@cache
def build(decoder_layers: int = 3, seed: int = 0, width: int = 32) -> PreTrainedModel:
    """A model with fewer encoder than decoder layers, made once per session; do not change it."""
    torch.manual_seed(seed)
    config = T.WhisperConfig(
        vocab_size=VOCAB,
        d_model=width,
        encoder_layers=1,
        decoder_layers=decoder_layers,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=2 * width,
        num_mel_bins=BINS,
        max_source_positions=FRAMES // 2,
        max_target_positions=POSITIONS,
        pad_token_id=EOS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        decoder_start_token_id=START,
        init_std=0.4,
    )
    model = T.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.model.decoder.embed_positions.weight.normal_(0, 1.0)
        # What is said must follow from the sound, not from the tokens alone.
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(3)
    settings = model.generation_config
    settings.no_timestamps_token_id = NO_TIMESTAMPS
    settings.is_multilingual = False
    settings.suppress_tokens = [EOS]
    settings.begin_suppress_tokens = [5]
    settings.max_length = POSITIONS
    return model


def sound(rows: int, frames: int = FRAMES) -> Tensor:
    """(rows, bins, frames) float32, other sound in every row."""
    return torch.randn(rows, BINS, frames, generator=torch.Generator().manual_seed(4))


@cache
def decoder_alone(layers: int = 2) -> PreTrainedModel:
    """The first decoder layers of the model as distil-whisper is loaded for drafting."""
    part = hf_spec.truncated_draft(build(), layers)
    model = T.WhisperForCausalLM(T.WhisperConfig(**part.config.to_diff_dict())).eval()
    model.model.decoder = part.model.decoder
    model.proj_out = part.proj_out
    return model
