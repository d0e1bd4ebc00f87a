"""Random MTP modules in every layout, and reference drafts computed without a cache."""

from __future__ import annotations

import atexit
import copy
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as T
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from hf_spec.methods.mtp.head import MtpHead, canonical_names, find_module, head_of_target_files
from tests import tiny_models
from tests.tiny_models import LLAMA_LIKE, VOCAB

# Layout -> prefix, names of embedding norm, feature norm, projection and last norm, layer prefix.
NAMES = {
    "index": ("model.layers.{n}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm"), ""),
    "qwen": ("mtp.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm"), "layers.0."),
    "mimo": (
        "model.mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
    ),
    "speculators": (
        "mtp_layers.0.",
        ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm"),
        "",
    ),
}
HIDES_FIRST = ("index", "mimo")


@cache
def qwen3_next() -> PreTrainedModel:
    """Return a tiny hybrid target whose norms add one to their weights."""
    torch.manual_seed(8)
    config = T.Qwen3NextConfig(
        **LLAMA_LIKE,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "linear_attention", "full_attention"],
    )
    model = T.Qwen3NextForCausalLM(config).eval()
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def target(name: str) -> PreTrainedModel:
    return qwen3_next() if name == "qwen3_next" else tiny_models.build(name)


@cache
def scratch() -> Path:
    folder = tempfile.mkdtemp(prefix="mtp_modules_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@dataclass(frozen=True)
class Sample:
    """MTP module in one layout, with a target that was loaded from the folder that stores both."""

    layout: str
    model: PreTrainedModel
    parts: dict[str, Tensor]
    layer: dict[str, Tensor]
    stored: dict[str, Tensor]

    @property
    def head(self) -> MtpHead:
        return _head(self.model.name_or_path, self.layout)


@cache
def _head(folder: str, layout: str) -> MtpHead:
    return head_of_target_files(sample(Path(folder).name.partition("-")[0], layout).model)


def module_for(
    model: PreTrainedModel, layout: str, folder: Path | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return a random module (parts, layer, both as stored) and the model's own tensors."""
    folder = folder or scratch() / f"other-{layout}"
    model.save_pretrained(folder)
    weights = load_file(folder / "model.safetensors")
    depth, width = model.config.num_hidden_layers, model.config.hidden_size
    # The module's layer has full attention, like the target's last one.
    own = f"layers.{depth - 1}."
    prefix, names, inner = NAMES[layout]
    prefix = prefix.format(n=depth)
    generator = torch.Generator().manual_seed(12)

    def noise(tensor: Tensor, plain: bool) -> Tensor:
        drawn = torch.randn(tensor.shape, generator=generator) * 0.25
        return 1 + drawn if tensor.ndim == 1 and not plain else drawn

    centred = "Qwen3Next" in type(model).__name__
    layer = {
        key.rpartition(own)[2]: noise(tensor, centred or "norm" not in key)
        for key, tensor in weights.items()
        if own in key
    }
    blank = torch.zeros(width)
    shapes = (blank, blank, torch.zeros(width, 2 * width), blank)
    parts = {key: noise(shape, centred) for key, shape in zip(names, shapes, strict=True)}
    stored = {f"{prefix}{key}.weight": tensor for key, tensor in parts.items()}
    stored |= {f"{prefix}{inner}{key}": tensor for key, tensor in layer.items()}
    if layout == "index":
        # Copies that must be ignored.
        stored[f"{prefix}embed_tokens.weight"] = torch.zeros(VOCAB, width)
        stored[f"{prefix}shared_head.head.weight"] = torch.zeros(VOCAB, width)
    return parts, layer, stored, weights


@cache
def sample(name: str, layout: str) -> Sample:
    """Return a random module in the files of the named model, loaded as users do."""
    model = target(name)
    folder = scratch() / f"{name}-{layout}"
    parts, layer, stored, weights = module_for(model, layout, folder)
    save_file({**weights, **stored}, folder / "model.safetensors", {"format": "pt"})
    loaded = type(model).from_pretrained(folder).eval()
    loaded.generation_config = model.generation_config
    return Sample(layout, loaded, parts, layer, stored)


@cache
def random_mtp_head(name: str) -> MtpHead:
    """Return a random head for the named model, which was not loaded from files."""
    return head_for(target(name), sample(name, "qwen").stored)


def head_for(model: PreTrainedModel, stored: dict[str, Tensor] | None = None) -> MtpHead:
    """Return a head with the stored tensors, or with random ones."""
    stored = stored or module_for(model, "qwen")[2]
    found = find_module(stored, model.config.get_text_config().num_hidden_layers)
    assert found is not None
    names = canonical_names(stored, *found)
    tensors = {own: stored[key] for key, own in names.items()}
    return MtpHead("a random head", found[0], tensors, model)


def save_speculators(found: Sample, folder: Path) -> str:
    """Write a module in the layout of the package speculators, and return the folder."""
    config = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(found.stored, folder / "model.safetensors")
    return str(folder)


def rms(hidden: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return hidden / (hidden.square().mean(-1, keepdim=True) + eps).sqrt() * weight


class Reference:
    """MTP module in plain torch; `layer` runs its decoder layer over (T, H) from position 0."""

    def __init__(self, found: Sample, layer: Callable[[Tensor], Tensor] | None = None):
        self.found, self.model = found, found.model
        self.layer = layer or self._llama_layer
        self.centred = "Qwen3Next" in type(found.model).__name__

    @torch.no_grad()
    def logits(self, text: Sequence[int], path: Sequence[int] = ()) -> Tensor:
        """Return (V,) logits after `text` and the drafted tokens `path`."""
        ids = torch.tensor([list(text[:-1])])
        features = self.model(ids, output_hidden_states=True).hidden_states[-1][0]
        tokens = list(text[1:])
        raw = self.outputs(tokens, features)
        for token in path:
            fed = raw if self.found.layout == "index" else self.norm(raw, 3)
            features = torch.cat([features, fed[-1:]])
            tokens.append(token)
            raw = self.outputs(tokens, features)
        head: Any = self.model.get_output_embeddings()
        return head(self.norm(raw[-1], 3))

    def outputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Return (T, H) outputs of the layer for pairs."""
        embedding: Any = self.model.get_input_embeddings()
        embedded = embedding(torch.tensor(tokens)).clone()
        if self.found.layout in HIDES_FIRST:
            embedded[0] = 0
        parts = [self.norm(embedded, 0), self.norm(features, 1)]
        if self.found.layout == "mimo":
            parts = parts[::-1]
        return self.layer(torch.cat(parts, dim=-1) @ self.part(2).T)

    def part(self, index: int) -> Tensor:
        return self.found.parts[NAMES[self.found.layout][1][index]]

    def norm(self, hidden: Tensor, index: int) -> Tensor:
        return rms(hidden, self.part(index) + float(self.centred))

    def _llama_layer(self, hidden: Tensor) -> Tensor:
        t, count = self.found.layer, len(hidden)
        normed = rms(hidden, t["input_layernorm.weight"])
        q, k, v = (
            (normed @ t[f"self_attn.{name}_proj.weight"].T).view(count, -1, 8).transpose(0, 1)
            for name in "qkv"
        )
        angles = torch.arange(count)[:, None] * 10_000.0 ** (-torch.arange(4) / 4)
        q, k = (_turned(part, angles) for part in (q, k))
        k, v = (part.repeat_interleave(len(q) // len(k), 0) for part in (k, v))
        scores = (q @ k.transpose(1, 2) / 8**0.5).masked_fill(
            torch.ones(count, count).triu(1).bool(), -torch.inf
        )
        seen = (scores.softmax(-1) @ v).transpose(0, 1).reshape(count, -1)
        hidden = hidden + seen @ t["self_attn.o_proj.weight"].T
        normed = rms(hidden, t["post_attention_layernorm.weight"])
        inner = F.silu(normed @ t["mlp.gate_proj.weight"].T) * (normed @ t["mlp.up_proj.weight"].T)
        return hidden + inner @ t["mlp.down_proj.weight"].T


def _turned(heads: Tensor, angles: Tensor) -> Tensor:
    halves = torch.complex(*heads.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([halves.real, halves.imag], dim=-1)


def own_layer(found: Sample) -> Callable[[Tensor], Tensor]:
    """Return the module's layer as a layer of the target's class, called without a cache."""
    decoder: Any = found.model.get_decoder()
    last = len(decoder.layers) - 1
    stored = {f"model.layers.{last}.{name}": tensor for name, tensor in found.layer.items()}
    # Loading by the target's class converts stored experts.
    config = copy.deepcopy(found.model.config)
    config._name_or_path = ""
    rest = {k: t for k, t in plain_weights(found).items() if k not in stored}
    whole = type(found.model).from_pretrained(None, config=config, state_dict={**rest, **stored})
    loaded: Any = whole.eval().get_decoder()

    def run(hidden: Tensor) -> Tensor:
        count = len(hidden)
        positions = torch.arange(count)[None]
        mask = torch.zeros(count, count).masked_fill(
            torch.ones(count, count).triu(1).bool(), torch.finfo(torch.float).min
        )
        output = loaded.layers[-1](
            hidden[None],
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=loaded.rotary_emb(hidden[None], positions),
        )
        return (output if isinstance(output, Tensor) else output[0])[0]

    return run


def plain_weights(found: Sample) -> dict[str, Tensor]:
    """Return the stored tensors of the target alone."""
    stored = load_file(Path(found.model.name_or_path) / "model.safetensors")
    return {name: tensor for name, tensor in stored.items() if name not in found.stored}


class TheirReference(Reference):
    """Module run by transformers' `MtpModel`, without a cache."""

    def __init__(self, found: Sample):
        super().__init__(found)
        theirs = MtpModel(found.model, 1)
        copied = own_layer_weights(found)
        theirs.layers[0].mtp_block.load_state_dict(copied)
        for index, name in enumerate(("enorm", "hnorm", "eh_proj", "post_norm")):
            getattr(theirs.layers[0], name).weight.data = self.part(index).clone()
        self.theirs = theirs.eval()
        self.theirs.layers[0].mtp_block.register_forward_hook(self._note)

    def outputs(self, tokens: Sequence[int], features: Tensor) -> Tensor:
        """Return (T, H) outputs of the layer for pairs; the first pair has no embedding."""
        embedding: Any = self.model.get_input_embeddings()
        embedded = embedding(torch.tensor([list(tokens)])).clone()
        embedded[:, 0] = 0
        positions = torch.arange(len(tokens))[None]
        self.theirs.forward_layer(0, features[None], positions, None, inputs_embeds=embedded)
        return self._raw[0]

    def _note(self, module: Any, inputs: Any, output: Any) -> None:
        self._raw = output if isinstance(output, Tensor) else output[0]


def own_layer_weights(found: Sample) -> dict[str, Tensor]:
    """Return the layer's weights in the layout of the target's class."""
    return dict(found.head.attention.layers[0].state_dict())
