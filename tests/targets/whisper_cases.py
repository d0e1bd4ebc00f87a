"""Tiny random Whisper models, audio for them, draft models, and a speech-recognition pipeline.

Tokens are ordered as in Whisper: text, the end, the start, "no timestamps", timestamps.
"""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers as T
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec
from tests.tiny_models import VOCAB, shared

EOS, START, NO_TIMESTAMPS = 70, 71, 72
BINS = 8
# Frames of an encoder input: one second of audio, two frames per position of the encoder.
FRAMES = 40
SAMPLES = 16000
POSITIONS = 256
# No timestamps, like a trained model by default, and no end of sequence.
TEXT_ALONE = {"suppress_tokens": [EOS, *range(NO_TIMESTAMPS, VOCAB)]}


@shared
def build(
    seed: int = 0, width: int = 32, bins: int = BINS, decoder_layers: int = 3
) -> PreTrainedModel:
    """Return a model with fewer encoder than decoder layers, shared by tests; do not modify it."""
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
        num_mel_bins=bins,
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
        # Tokens must depend on position and audio, not only on the last tokens.
        torch.manual_seed(seed + 1)
        model.model.decoder.embed_positions.weight.normal_(0, 1.5)
        for layer in model.model.decoder.layers:
            layer.encoder_attn.out_proj.weight.mul_(0.5)
    settings: Any = model.generation_config
    settings.no_timestamps_token_id = NO_TIMESTAMPS
    settings.is_multilingual = False
    settings.suppress_tokens = [EOS]
    settings.begin_suppress_tokens = [5]
    settings.max_length = None
    settings.max_new_tokens = 30
    return model


def sound(rows: int, frames: int = FRAMES) -> Tensor:
    """Return (rows, bins, frames) float32 features, different in every row."""
    return torch.randn(rows, BINS, frames, generator=torch.Generator().manual_seed(4))


def recordings() -> dict[str, Tensor]:
    """Return two recordings of different lengths, both longer than two encoder inputs."""
    mask = torch.ones(2, 130, dtype=torch.long)
    mask[1, 90:] = 0
    return {"input_features": sound(2, 130), "attention_mask": mask}


@cache
def first_layers() -> PreTrainedModel:
    """Return the target with fewer decoder layers; all its modules are shared, the encoder too."""
    return hf_spec.truncated_draft(build(), 2)


@cache
def decoder_alone() -> PreTrainedModel:
    """Return it as `AutoModelForCausalLM` loads it, like distil-whisper for drafting."""
    whole: Any = first_layers()
    with torch.device("meta"):
        model: Any = T.WhisperForCausalLM(copy.deepcopy(whole.config)).eval()
    model.model.decoder, model.proj_out = whole.model.decoder, whole.proj_out
    return model


@cache
def own_encoder() -> PreTrainedModel:
    """Return a copy of the target that shares no module with it."""
    return copy.deepcopy(build())


def pipeline() -> Any:
    """Return a speech-recognition pipeline with a tokenizer of one letter per token."""
    vocab = {chr(33 + index): index for index in range(EOS)}
    tokenizer = T.WhisperTokenizer(
        vocab={**vocab, "<|endoftext|>": EOS}, merges=[], pad_token="<|endoftext|>"
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|startoftranscript|>", "<|notimestamps|>"]}
    )
    tokenizer.add_tokens([f"<|{0.02 * step:.2f}|>" for step in range(VOCAB - NO_TIMESTAMPS - 1)])
    extractor = T.WhisperFeatureExtractor(
        feature_size=BINS, sampling_rate=SAMPLES, hop_length=SAMPLES // FRAMES, chunk_length=1
    )
    return T.AutomaticSpeechRecognitionPipeline(
        model=build(), tokenizer=tokenizer, feature_extractor=extractor
    )
