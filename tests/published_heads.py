"""Random heads in their Hub layouts: EAGLE-3 in three layouts, P-EAGLE and EAGLE-1.

Their reference drafts are recomputed from the whole text for every token, in plain torch.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from tests.tiny_models import VOCAB, build

WIDTH, HEADS, KEYS, SIZE, INNER, KNOWN = 32, 4, 2, 8, 48, 60
MASK = VOCAB - 1


def sizes(
    width: int = WIDTH,
    target: int = WIDTH,
    head_size: int = SIZE,
    num_aux: int = 3,
    known: int = KNOWN,
    prefix: str = "layers.0.",
) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of an EAGLE-3 head."""
    attention = prefix + "self_attn."
    return {
        "fc.weight": (width, num_aux * target),
        prefix + "hidden_norm.weight": (width,),
        prefix + "input_layernorm.weight": (width,),
        prefix + "post_attention_layernorm.weight": (width,),
        attention + "q_proj.weight": (HEADS * head_size, 2 * width),
        attention + "k_proj.weight": (KEYS * head_size, 2 * width),
        attention + "v_proj.weight": (KEYS * head_size, 2 * width),
        attention + "o_proj.weight": (width, HEADS * head_size),
        prefix + "mlp.gate_proj.weight": (INNER, width),
        prefix + "mlp.up_proj.weight": (INNER, width),
        prefix + "mlp.down_proj.weight": (width, INNER),
        "norm.weight": (width,),
        "lm_head.weight": (known, width),
    }


def first_sizes() -> dict[str, Sequence[int]]:
    """Return the tensor shapes of an EAGLE-1 head."""
    plain = {k: v for k, v in sizes().items() if k.startswith("layers.0.")}
    left_out = ("input_layernorm", "hidden_norm")
    shapes = {k: v for k, v in narrow(plain).items() if not any(name in k for name in left_out)}
    return {**shapes, "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,)}


def narrow(shapes: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the shapes with an ordinary layer's q, k and v, which read only hidden states."""
    wide = ("q_proj", "k_proj", "v_proj")
    return {k: (v[0], WIDTH) if any(n in k for n in wide) else v for k, v in shapes.items()}


def random_tensors(shapes: Mapping[str, Sequence[int]], seed: int = 2) -> dict[str, Tensor]:
    """Return random tensors, norms around one and all others around zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(tuple(shape), generator=generator)
        tensors[name] = 1 + 0.2 * noise if "norm" in name else 0.25 * noise
    return tensors


def bare(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of layers that add nothing, with norms that keep directions."""
    return {
        name: torch.ones_like(tensor) if "norm" in name else torch.zeros_like(tensor)
        for name, tensor in tensors.items()
    }


def embeddings() -> torch.Tensor:
    table: Any = build("llama").get_input_embeddings()
    return table.weight.detach()


@cache
def offsets(known: int = KNOWN) -> Tensor:
    """Return (R,) int64 offsets of target ids from the head's own ids."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randperm(VOCAB, generator=generator)[:known].sort().values
    return ids - torch.arange(known)


def plain_config(**more: Any) -> dict[str, Any]:
    """Return a config in SafeAILab's layout, that of a Llama with one layer."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": VOCAB,
        "draft_vocab_size": KNOWN,
        **more,
    }


def speculators_config(kind: str = "eagle3", **more: Any) -> dict[str, Any]:
    """Return a config in the layout of vLLM's speculators."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": kind,
        "draft_vocab_size": KNOWN,
        "transformer_layer_config": {**plain_config(), "head_dim": SIZE, "rope_theta": 10000.0},
        "speculators_config": {"verifier": {"name_or_path": "org/other"}},
        **more,
    }


def converted_config(**more: Any) -> dict[str, Any]:
    """Return the complete config of a head that `speculators convert` wrote."""
    layer = {**plain_config(), "head_dim": SIZE, "rope_theta": 10000.0, "rope_scaling": None}
    del layer["draft_vocab_size"], layer["architectures"]
    return {
        "architectures": ["Eagle3DraftModel"],
        "auto_map": {"": "config.Eagle3SpeculatorConfig"},
        "draft_vocab_size": KNOWN,
        "eagle_aux_hidden_state_layer_ids": None,
        "embed_requires_grad": False,
        "norm_before_fc": False,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "/models/llama"},
        },
        "speculators_model_type": "eagle3",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layer,
        **more,
    }


def mask_of(offsets: Tensor) -> Tensor:
    """Return (V,) bool: the tokens that a head can draft."""
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[offsets + torch.arange(len(offsets))] = True
    return mask


@cache
def scratch() -> Path:
    """Return a folder for heads, deleted at exit."""
    folder = tempfile.mkdtemp(prefix="published_heads_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def save(name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Write a head to a folder and return its path."""
    folder = scratch() / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    return str(folder)


@dataclass(frozen=True)
class Sample:
    """Head in a folder, with its options and its tensors by their speculators names."""

    folder: str
    tensors: dict[str, Tensor]
    family: str = "eagle3"
    theta: float = 10000.0
    norm_before_residual: bool = False
    norm_output: bool = False
    aux: tuple[int, ...] = (2, 1, 0)
    window: int | None = None

    def reference(self, name: str = "llama", table: Tensor | None = None) -> Reference:
        """Return the reference of this head for the named model."""
        return Reference(self, build(name), table)


@cache
def sample(kind: str = "eagle3") -> Sample:
    """Return a head for the tiny Llama in a layout."""
    mask = {"t2d": torch.zeros(VOCAB, dtype=torch.bool)}
    if kind == "eagle":
        tensors = random_tensors(first_sizes())
        # There is no norm before the target's head; larger logits would be overconfident.
        tensors["fc.weight"] *= 0.2
        config = plain_config()
        del config["draft_vocab_size"]
        return Sample(save(kind, config, tensors), tensors, "eagle", aux=(-1,))
    if kind == "every token":
        tensors = random_tensors(sizes(known=VOCAB))
        return Sample(save("every", plain_config(), tensors), tensors)
    tensors = {**random_tensors(sizes()), "d2t": offsets()}
    published = {k.replace("layers.0.", "midlayer."): t for k, t in tensors.items()}
    if kind == "eagle3":
        return Sample(save(kind, plain_config(), {**published, **mask}), tensors)
    if kind == "specforge":
        inner = {"eagle_aux_hidden_state_layer_ids": [1, 0, -1], "use_aux_hidden_state": True}
        more = {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": SIZE, "rope_theta": 5e5}
        config = plain_config(**more, eagle_config=inner)
        return Sample(save(kind, config, {**published, **mask}), tensors, theta=5e5)
    table = torch.randn(VOCAB, WIDTH, generator=torch.Generator().manual_seed(6))
    tensors["embed_tokens.weight"] = table
    if kind == "speculators":
        config = speculators_config(
            norm_before_residual=True, norm_output=True, eagle_aux_hidden_state_layer_ids=[2, 1, 0]
        )
        folder = save(kind, config, tensors)
        return Sample(folder, tensors, norm_before_residual=True, norm_output=True)
    assert kind == "peagle"
    second = {
        name.replace("layers.0.", "layers.1."): shape
        for name, shape in narrow(sizes()).items()
        if name.startswith("layers.0.") and "hidden_norm" not in name
    }
    tensors.update(random_tensors(second, seed=8))
    tensors.update(random_tensors({"mask_hidden": (1, 1, 3 * WIDTH)}, seed=9))
    config = speculators_config("peagle", mask_token_id=MASK)
    return Sample(save(kind, config, tensors), tensors, "peagle")


class Reference:
    """Head of one or more layers in plain torch, without a cache."""

    def __init__(self, head: Sample, model: PreTrainedModel, table: Tensor | None = None):
        self.head, self.model, self.t = head, model, head.tensors
        own = self.t.get("embed_tokens.weight")
        shared: Any = model.get_input_embeddings()
        self.table = table if table is not None else own if own is not None else shared.weight
        self.num_layers = 1 + max(int(k[7]) for k in self.t if k.startswith("layers."))

    @torch.no_grad()
    def logits(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return (R,) logits after the committed tokens and a drafted path."""
        ids = torch.tensor([list(tokens)])
        states = self.model(ids[:, :-1], output_hidden_states=True).hidden_states
        features = self.fuse([states[layer][0] for layer in self.head.aux])
        text = ids[0, 1:]
        if self.head.family == "peagle":
            mask = self.fuse(self.t["mask_hidden"].view(3, 1, -1).unbind())
            count = len(path)
            text = torch.cat([text, torch.full((count,), MASK)])
            return self.read(self.outputs(text, torch.cat([features, mask.expand(count, -1)]))[-1])
        for token in path:
            newest = self.onward(self.outputs(text, features)[-1:])
            text, features = torch.cat([text, torch.tensor([token])]), torch.cat([features, newest])
        return self.read(self.outputs(text, features)[-1])

    def ids(self, indices: Tensor) -> Tensor:
        """Return the target's token ids of the head's own ids."""
        return indices + self.t["d2t"][indices] if "d2t" in self.t else indices

    def probs(self, tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        """Return the (V,) distribution after a path, 0 for tokens that the head cannot draft."""
        few = self.logits(tokens, path).softmax(dim=-1)
        return torch.zeros(VOCAB).index_copy(0, self.ids(torch.arange(len(few))), few)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Return (T, h) features of (T, H) states."""
        if self.head.family == "eagle":
            return states[0]
        parts = [
            self.norm(part, f"fc_norm.{i}.weight") if f"fc_norm.{i}.weight" in self.t else part
            for i, part in enumerate(states)
        ]
        joined = torch.cat(parts, dim=-1)
        if "input_norm.weight" in self.t:
            joined = self.norm(joined, "input_norm.weight")
        return F.linear(joined, self.t["fc.weight"], self.t.get("fc.bias"))

    def outputs(self, tokens: Tensor, features: Tensor) -> Tensor:
        """Return (T, h) outputs of (T,) tokens and (T, h) features, with causal attention."""
        embedded = self.table[tokens]
        if self.head.family == "eagle":
            joined = torch.cat([embedded, features], dim=-1)
            residual = entered = F.linear(joined, self.t["fc.weight"], self.t["fc.bias"])
        else:
            normed = self.norm(features, "layers.0.hidden_norm.weight")
            residual = normed if self.head.norm_before_residual else features
            entered = torch.cat(
                [self.norm(embedded, "layers.0.input_layernorm.weight"), normed], dim=-1
            )
        for layer in range(self.num_layers):
            prefix = f"layers.{layer}."
            if layer:
                entered = self.norm(residual, prefix + "input_layernorm.weight")
            hidden = residual + self.attention(entered, prefix + "self_attn.")
            normed = self.norm(hidden, prefix + "post_attention_layernorm.weight")
            gate = F.silu(normed @ self.t[prefix + "mlp.gate_proj.weight"].T)
            up = normed @ self.t[prefix + "mlp.up_proj.weight"].T
            residual = hidden + (gate * up) @ self.t[prefix + "mlp.down_proj.weight"].T
        return residual

    def attention(self, entered: Tensor, prefix: str) -> Tensor:
        """Return causal attention, within the window if there is one; positions start at 0."""
        count = len(entered)
        size = self.t[prefix + "o_proj.weight"].shape[1] // HEADS

        def part(name: str, heads: int) -> Tensor:
            bias = self.t.get(f"{prefix}{name}_proj.bias")
            found = F.linear(entered, self.t[f"{prefix}{name}_proj.weight"], bias)
            found = found.view(count, heads, size)
            norm = f"{prefix}{name}_norm.weight"
            found = self.norm(found, norm) if norm in self.t else found
            return found.transpose(0, 1)

        q, k = self.turned(part("q", HEADS)), self.turned(part("k", KEYS))
        k, v = (x.repeat_interleave(HEADS // KEYS, 0) for x in (k, part("v", KEYS)))
        scores = q @ k.mT / math.sqrt(size)
        every = torch.ones(count, count, dtype=torch.bool)
        hidden = every.triu(1)
        if self.head.window is not None:
            hidden |= every.tril(-self.head.window)
        mixed = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1) @ v
        joined = mixed.transpose(0, 1).reshape(count, -1)
        return F.linear(
            joined, self.t[prefix + "o_proj.weight"], self.t.get(prefix + "o_proj.bias")
        )

    def turned(self, heads: Tensor) -> Tensor:
        """Return (heads, T, D) rotated by their positions."""
        size = heads.shape[-1]
        rates = self.head.theta ** (-torch.arange(0, size, 2) / size)
        angles = torch.outer(torch.arange(heads.shape[1]).float(), rates)
        cos, sin = angles.cos(), angles.sin()
        left, right = heads.chunk(2, dim=-1)
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Apply RMS norm with a weight of the head."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.t[name]

    def onward(self, output: Tensor) -> Tensor:
        """Return the feature of the next step."""
        return self.norm(output, "norm.weight") if self.head.norm_output else output

    def read(self, output: Tensor) -> Tensor:
        """Return (R,) logits of an output."""
        if self.head.family == "eagle":
            target: Any = self.model
            return target.lm_head(output)
        return self.norm(output, "norm.weight") @ self.t["lm_head.weight"].T
