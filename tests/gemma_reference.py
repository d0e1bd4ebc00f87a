"""Random Gemma 4 assistants, and a reference in plain torch that runs one node at a time."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.compat import CACHE_NAME
from hf_spec.engine.forward.step import storing_layers
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.gemma_assistant.head import FAMILY, GemmaAssistant, build
from tests import tiny_models
from tests.tiny_models import VOCAB, WINDOW

WIDTH = 24
INNER = 40
KINDS = ("sliding_attention", "sliding_attention", "full_attention")


@cache
def gemma4(shared: int = 0) -> PreTrainedModel:
    """Return a tiny Gemma 4 with larger heads in full-attention layers.

    The last `shared` layers share keys and values.
    """
    torch.manual_seed(4)
    config = T.Gemma4TextConfig(
        **{**tiny_models.LLAMA_LIKE, "num_hidden_layers": 6},
        head_dim=8,
        global_head_dim=16,
        sliding_window=WINDOW,
        layer_types=list(KINDS * 2),
        num_kv_shared_layers=shared,
        hidden_size_per_layer_input=4 if shared else 0,
        vocab_size_per_layer_input=VOCAB if shared else 0,
    )
    model = T.Gemma4ForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


@lru_cache(16)
@torch.no_grad()
def past(model: PreTrainedModel, text: tuple[int, ...]) -> tuple[Any, Tensor]:
    """Return the KV cache layers of a text and its last (H,) state.

    Layers with a sliding window keep all keys and values.
    """
    kept = DynamicCache()
    ids = torch.tensor([text], device=model.device)
    output = model(ids, **{CACHE_NAME: kept}, output_hidden_states=True, use_cache=True)
    return kept.layers, output.hidden_states[-1][0, -1]


def published(model: PreTrainedModel, groups: int | None = None) -> PublishedHead:
    """Return a random assistant for a model, in the published layout."""
    config: Any = model.config.get_text_config()
    layers = storing_layers(config)
    kept, state = past(model, (5, 6, 7))
    torch.manual_seed(6)
    hidden, heads = state.shape[0], config.num_attention_heads
    vocab_size = num_embeddings(model)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab_size, WIDTH),
        "model.norm.weight": (WIDTH,),
        "pre_projection.weight": (WIDTH, 2 * hidden),
        "post_projection.weight": (hidden, WIDTH),
    }
    for index, kind in enumerate(layers):
        size, answered = (
            part.shape[-1] for part in (kept[layers[kind]].keys, kept[layers[kind]].values)
        )
        shapes |= {
            f"model.layers.{index}.{name}": shape
            for name, shape in {
                "self_attn.q_proj.weight": (heads * size, WIDTH),
                "self_attn.o_proj.weight": (WIDTH, heads * answered),
                "self_attn.q_norm.weight": (size,),
                "mlp.gate_proj.weight": (INNER, WIDTH),
                "mlp.up_proj.weight": (INNER, WIDTH),
                "mlp.down_proj.weight": (WIDTH, INNER),
                "input_layernorm.weight": (WIDTH,),
                "post_attention_layernorm.weight": (WIDTH,),
                "pre_feedforward_layernorm.weight": (WIDTH,),
                "post_feedforward_layernorm.weight": (WIDTH,),
                "layer_scalar": (1,),
            }.items()
        }
    # Norms and scalars are close to one.
    tensors = {
        name: torch.randn(shape) * 0.3 + float(len(shape) == 1) for name, shape in shapes.items()
    }
    if groups:
        tensors["masked_embedding.centroids.weight"] = torch.randn(groups, WIDTH)
        tensors["masked_embedding.token_ordering"] = torch.randperm(vocab_size)
    text = {"layer_types": list(layers), "sliding_window": WINDOW, "rms_norm_eps": 1e-6}
    stored = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": FAMILY,
        "centroid_intermediate_top_k": 2,
        "text_config": text,
    }
    return PublishedHead(FAMILY, stored, tensors, Path(), "random-assistant")


def save(head: PublishedHead, folder: Path) -> None:
    """Write an assistant in its Hub layout."""
    (folder / "config.json").write_text(json.dumps(head.config), encoding="utf-8")
    save_file(head.tensors, folder / "model.safetensors")


@cache
def random_assistant(name: str) -> GemmaAssistant:
    """Return a random assistant for the named tiny model."""
    model = tiny_models.build(name)
    return build(published(model), model)


@torch.no_grad()
def reference(
    head: PublishedHead, model: PreTrainedModel, text: Sequence[int], path: Sequence[int]
) -> Tensor:
    """Return (V,) logits after `text` and the drafted tokens `path`."""
    kept, state = past(model, tuple(text[:-1]))
    embedding: Any = model.get_input_embeddings()
    for token in (text[-1], *path):
        embedded = embedding(torch.tensor(token))
        logits, state = _step(head, model, kept, torch.cat([embedded, state]), len(text) - 1)
    return logits


def _step(
    head: PublishedHead, model: PreTrainedModel, kept: Any, inputs: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    tensors = {n.removeprefix("model."): w for n, w in head.tensors.items()}
    hidden = tensors["pre_projection.weight"] @ inputs
    layers = storing_layers(model.config.get_text_config())
    for index, kind in enumerate(head.config["text_config"]["layer_types"]):
        weights = {
            n.removeprefix(f"layers.{index}."): w
            for n, w in tensors.items()
            if n.startswith(f"layers.{index}.")
        }
        stored = kept[layers[kind]]
        keys, values = stored.keys[0], stored.values[0]
        if kind == "sliding_attention":
            keys, values = keys[:, -WINDOW - 1 :], values[:, -WINDOW - 1 :]
        asked = _attend(
            weights, kind, _norm(hidden, weights["input_layernorm.weight"]), keys, values, position
        )
        asked = weights["self_attn.o_proj.weight"] @ asked
        hidden = hidden + _norm(asked, weights["post_attention_layernorm.weight"])
        inner = _norm(hidden, weights["pre_feedforward_layernorm.weight"])
        gate = torch.nn.functional.gelu(weights["mlp.gate_proj.weight"] @ inner, approximate="tanh")
        inner = weights["mlp.down_proj.weight"] @ (gate * (weights["mlp.up_proj.weight"] @ inner))
        hidden = hidden + _norm(inner, weights["post_feedforward_layernorm.weight"])
        hidden = hidden * weights["layer_scalar"]
    hidden = _norm(hidden, tensors["norm.weight"])
    return tensors["embed_tokens.weight"] @ hidden, tensors["post_projection.weight"] @ hidden


def _attend(
    weights: dict[str, Tensor],
    kind: str,
    hidden: Tensor,
    keys: Tensor,
    values: Tensor,
    position: int,
) -> Tensor:
    """Return attention of one rotated query per head over (H_kv, S, D) keys and values."""
    size = keys.shape[-1]
    queries = (weights["self_attn.q_proj.weight"] @ hidden).view(-1, size)
    queries = _norm(queries, weights["self_attn.q_norm.weight"])
    base, turned = (10_000.0, size // 2) if kind == "sliding_attention" else (1e6, size // 8)
    angles = torch.zeros(size // 2)
    angles[:turned] = position * base ** (-torch.arange(turned) * 2 / size)
    halves = torch.complex(*queries.chunk(2, dim=-1)) * torch.polar(torch.ones(()), angles)
    queries = torch.cat([halves.real, halves.imag], dim=-1)
    groups = len(queries) // len(keys)
    scores = queries[:, None] @ keys.repeat_interleave(groups, 0).transpose(1, 2)
    return (scores.softmax(dim=-1) @ values.repeat_interleave(groups, 0)).flatten()


def _norm(values: Tensor, weight: Tensor) -> Tensor:
    return values / (values.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
