"""Conversion of a small Whisper's CTranslate2 file back to the original model."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import WhisperConfig, WhisperForConditionalGeneration

from examples.studies.real_models.whisper import DTYPES, load_whisper, read_arrays

WIDTH, VOCAB = 16, 51865


def written(path: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> Path:
    """Write arrays in the format of CTranslate2."""

    def name(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    parts = [struct.pack("<I", 6), name("WhisperSpec"), struct.pack("<II", 3, len(arrays))]
    for key, array in arrays.items():
        parts.append(name(key) + struct.pack("<B", array.ndim))
        parts.append(struct.pack(f"<{array.ndim}I", *array.shape))
        parts.append(struct.pack("<BI", DTYPES.index(array.dtype.type), array.nbytes))
        parts.append(array.tobytes())
    path.write_bytes(b"".join(parts))
    return path


@pytest.fixture(scope="module")
def model() -> WhisperForConditionalGeneration:
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB,
        d_model=WIDTH,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=4 * WIDTH,
        decoder_ffn_dim=4 * WIDTH,
        max_source_positions=20,
        max_target_positions=12,
        num_mel_bins=80,
        pad_token_id=50257,
        bos_token_id=50257,
        eos_token_id=50257,
        decoder_start_token_id=50258,
    )
    model = WhisperForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        # Norms and biases start as ones and zeros, which would hide mistakes.
        parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def arrays_of(model: WhisperForConditionalGeneration) -> dict[str, np.ndarray[Any, Any]]:
    """Return the weights under their CTranslate2 names, with fused projections."""
    weights = model.state_dict()
    arrays: dict[str, Tensor] = {"encoder/num_heads": torch.tensor(2, dtype=torch.int16)}

    def put(theirs: str, *ours: str, kind: tuple[str, str] = ("weight", "bias")) -> None:
        arrays[f"{theirs}/{kind[0]}"] = torch.cat([weights[f"{name}.weight"] for name in ours])
        biases = [
            weights.get(f"{name}.bias", torch.zeros(len(weights[f"{name}.weight"])))
            for name in ours
        ]
        arrays[f"{theirs}/{kind[1]}"] = torch.cat(biases)

    norm = ("gamma", "beta")
    for side in ("encoder", "decoder"):
        for index in range(2):
            ours, theirs = f"model.{side}.layers.{index}", f"{side}/layer_{index}"
            mine = f"{ours}.self_attn"
            put(f"{theirs}/self_attention/linear_0", *(f"{mine}.{x}_proj" for x in "qkv"))
            put(f"{theirs}/self_attention/linear_1", f"{mine}.out_proj")
            put(f"{theirs}/self_attention/layer_norm", f"{mine}_layer_norm", kind=norm)
            if side == "decoder":
                cross = f"{ours}.encoder_attn"
                put(f"{theirs}/attention/linear_0", f"{cross}.q_proj")
                put(f"{theirs}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                put(f"{theirs}/attention/linear_2", f"{cross}.out_proj")
                put(f"{theirs}/attention/layer_norm", f"{cross}_layer_norm", kind=norm)
            put(f"{theirs}/ffn/linear_0", f"{ours}.fc1")
            put(f"{theirs}/ffn/linear_1", f"{ours}.fc2")
            put(f"{theirs}/ffn/layer_norm", f"{ours}.final_layer_norm", kind=norm)
        put(f"{side}/layer_norm", f"model.{side}.layer_norm", kind=norm)
        positions = weights[f"model.{side}.embed_positions.weight"]
        arrays[f"{side}/position_encodings/encodings"] = positions
    for name in ("conv1", "conv2"):
        put(f"encoder/{name}", f"model.encoder.{name}")
    arrays["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return {name: tensor.numpy() for name, tensor in arrays.items()}


@pytest.fixture(scope="module")
def file(model: WhisperForConditionalGeneration, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whisper")
    tokens = {f"t{token}": token for token in range(50257)}
    tokens |= {"<|endoftext|>": 50257, "<|startoftranscript|>": 50258, "<|en|>": 50259}
    Tokenizer(WordLevel(tokens, unk_token="t0")).save(str(folder / "tokenizer.json"))
    settings = {
        "lang_ids": [50259],
        "suppress_ids": [1, 2],
        "suppress_ids_begin": [220],
        "alignment_heads": [[1, 0]],
    }
    (folder / "config.json").write_text(json.dumps(settings))
    return written(folder / "model.bin", arrays_of(model))


def test_arrays_are_read(tmp_path: Path) -> None:
    arrays = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "number": np.array(8, dtype=np.int8),
    }
    found = read_arrays(written(tmp_path / "model.bin", arrays))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "half": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "number": 8,
    }


@torch.no_grad()
def test_the_logits_are_those_of_the_model(
    model: WhisperForConditionalGeneration, file: Path
) -> None:
    converted, processor = load_whisper(file)
    given = {
        "input_features": torch.randn(1, 80, 40),
        "decoder_input_ids": torch.tensor([[50258, 50259, 7]]),
    }
    assert torch.equal(converted(**given).logits, model(**given).logits)
    assert processor.feature_extractor.feature_size == 80


def test_the_settings_of_generate_survive_saving(file: Path, tmp_path: Path) -> None:
    load_whisper(file)[0].save_pretrained(tmp_path)
    settings = WhisperForConditionalGeneration.from_pretrained(tmp_path).generation_config
    assert settings.lang_to_id == {"<|en|>": 50259}
    assert settings.task_to_id["transcribe"] == 50359
    assert settings.suppress_tokens == [1, 2]
    assert settings.alignment_heads == [[1, 0]]
