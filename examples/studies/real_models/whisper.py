"""Load Whisper from a CTranslate2 model file into the model class of transformers.

CTranslate2 fuses the projections of an attention layer into one matrix, and its weight names
differ. The file is a header and a list of named arrays; see `read_arrays`.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Dtypes by their number in the file.
DTYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)
# Special tokens of the multilingual models, which the files of the checkpoint do not list.
END, START = 50257, 50258
TRANSLATE, TRANSCRIBE = 50358, 50359
PREVIOUS, NO_TIMESTAMPS = 50361, 50363


def read_arrays(path: Path) -> dict[str, Tensor]:
    """Return the arrays of a CTranslate2 file by name.

    The format is little-endian: version, name and revision of the model's specification, and the
    number of arrays. Each array has a name, number of dimensions, dimensions, dtype, size in
    bytes, and data. A name is stored as its length with the final zero, and its bytes.
    """
    data = path.read_bytes()
    position = 0

    def read(code: str) -> int:
        nonlocal position
        (value,) = struct.unpack_from(f"<{code}", data, position)
        position += struct.calcsize(code)
        return int(value)

    def read_name() -> str:
        nonlocal position
        length = read("H")
        name = data[position : position + length - 1].decode()
        position += length
        return name

    read("I")
    read_name()
    read("I")
    arrays = {}
    for _ in range(read("I")):
        name = read_name()
        shape = [read("I") for _ in range(read("B"))]
        dtype = np.dtype(DTYPES[read("B")])
        size = read("I")
        array = np.frombuffer(data, dtype, size // dtype.itemsize, position).reshape(shape)
        arrays[name] = torch.from_numpy(array.copy())
        position += size
    return arrays


def renamed(arrays: dict[str, Tensor], num_layers: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights with their names in transformers."""

    def linear(ours: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{ours}.weight", arrays[f"{theirs}/weight"]
        yield f"{ours}.bias", arrays[f"{theirs}/bias"]

    def norm(ours: str, theirs: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{ours}.weight", arrays[f"{theirs}/gamma"]
        yield f"{ours}.bias", arrays[f"{theirs}/beta"]

    def fused(ours: str, theirs: str, names: str) -> Iterator[tuple[str, Tensor]]:
        weights = arrays[f"{theirs}/weight"].chunk(len(names))
        biases = arrays[f"{theirs}/bias"].chunk(len(names))
        for name, weight, bias in zip(names, weights, biases, strict=True):
            yield f"{ours}.{name}_proj.weight", weight
            # Whisper's keys have no bias; CTranslate2 stores zeros.
            if name != "k":
                yield f"{ours}.{name}_proj.bias", bias

    for side in ("encoder", "decoder"):
        model = f"model.{side}"
        for index in range(num_layers):
            ours, theirs = f"{model}.layers.{index}", f"{side}/layer_{index}"
            yield from fused(f"{ours}.self_attn", f"{theirs}/self_attention/linear_0", "qkv")
            yield from linear(f"{ours}.self_attn.out_proj", f"{theirs}/self_attention/linear_1")
            yield from norm(f"{ours}.self_attn_layer_norm", f"{theirs}/self_attention/layer_norm")
            if side == "decoder":
                cross = f"{ours}.encoder_attn"
                yield from fused(cross, f"{theirs}/attention/linear_0", "q")
                yield from fused(cross, f"{theirs}/attention/linear_1", "kv")
                yield from linear(f"{cross}.out_proj", f"{theirs}/attention/linear_2")
                yield from norm(f"{cross}_layer_norm", f"{theirs}/attention/layer_norm")
            yield from linear(f"{ours}.fc1", f"{theirs}/ffn/linear_0")
            yield from linear(f"{ours}.fc2", f"{theirs}/ffn/linear_1")
            yield from norm(f"{ours}.final_layer_norm", f"{theirs}/ffn/layer_norm")
        yield from norm(f"{model}.layer_norm", f"{side}/layer_norm")
        yield f"{model}.embed_positions.weight", arrays[f"{side}/position_encodings/encodings"]
    for name in ("conv1", "conv2"):
        yield from linear(f"model.encoder.{name}", f"encoder/{name}")
    yield "model.decoder.embed_tokens.weight", arrays["decoder/embeddings/weight"]


def load_whisper(path: Path) -> tuple[Any, Any]:
    """Return the float32 model and its processor; tokenizer files are in the folder of `path`."""
    from transformers import (
        WhisperConfig,
        WhisperFeatureExtractor,
        WhisperForConditionalGeneration,
        WhisperProcessor,
        WhisperTokenizerFast,
    )

    arrays = read_arrays(path)
    vocab_size, width = arrays["decoder/embeddings/weight"].shape
    num_layers = sum(name.endswith("/self_attention/linear_0/weight") for name in arrays) // 2
    num_heads = int(arrays["encoder/num_heads"])
    num_positions = {
        f"max_{name}_positions": len(arrays[f"{side}/position_encodings/encodings"])
        for name, side in (("source", "encoder"), ("target", "decoder"))
    }
    config = WhisperConfig(
        vocab_size=vocab_size,
        d_model=width,
        encoder_layers=num_layers,
        decoder_layers=num_layers,
        encoder_attention_heads=num_heads,
        decoder_attention_heads=num_heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        num_mel_bins=arrays["encoder/conv1/weight"].shape[1],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        **num_positions,
    )
    model = WhisperForConditionalGeneration(config)
    weights = {name: array.float() for name, array in renamed(arrays, num_layers)}
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    # Strict loading: missing and unexpected tensors raise an error.
    model.load_state_dict(weights)
    tokenizer = WhisperTokenizerFast(tokenizer_file=str(path.parent / "tokenizer.json"))
    settings = json.loads((path.parent / "config.json").read_text())
    model.generation_config = _generation_config(tokenizer, settings, config.max_target_positions)
    features = WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    return model.eval(), WhisperProcessor(features, tokenizer)


def _generation_config(tokenizer: Any, settings: dict[str, Any], max_length: int) -> Any:
    """Return the generation config of Whisper's `generate()`."""
    from transformers import GenerationConfig

    languages = {token: tokenizer.convert_ids_to_tokens(token) for token in settings["lang_ids"]}
    return GenerationConfig(
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        max_length=max_length,
        no_timestamps_token_id=NO_TIMESTAMPS,
        prev_sot_token_id=PREVIOUS,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        lang_to_id={name: token for token, name in languages.items()},
        task_to_id={"transcribe": TRANSCRIBE, "translate": TRANSLATE},
        is_multilingual=True,
        return_timestamps=False,
    )
