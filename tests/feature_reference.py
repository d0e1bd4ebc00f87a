"""Random heads that draft several levels at once, with references in plain torch without caches.

Tensors are named as on the Hub. A reference returns the logits of the token after a text and a
drafted path.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.drafting.one_pass_drafter import ProposalDrafter
from hf_spec.engine.forward.draft_tree import DraftTree
from tests.published_heads import random_tensors
from tests.tiny_models import VOCAB

SIZE = 32
MASK = VOCAB - 1
# Block heads: block size, query heads, key and value heads, head size.
BLOCK, HEADS, KEYS, WIDTH = 5, 4, 2, 8
# DFlash 2: taps of a convolution, channels of a group, candidates per position.
TAPS, GROUP, CANDIDATES = 2, 8, 7
# Hidden states of the target that block heads read.
LAYERS = [0, 2]
RANK = 6

# (text, drafted path) -> (V,) logits of the next token.
Reference = Callable[[Sequence[int], Sequence[int]], Tensor]


def published(family: str, config: dict[str, Any], tensors: dict[str, Tensor]) -> PublishedHead:
    return PublishedHead(family, config, tensors, Path("a-head"), "a-head")


def save(folder: Path, head: PublishedHead, name: str = "model.safetensors") -> str:
    """Write a head in its Hub layout and return the folder."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head.config))
    save_file({k: t.clone().contiguous() for k, t in head.tensors.items()}, folder / name)
    return str(folder)


@cache
def medusa(
    blocks: int = 1, projected: bool = True, size: int = SIZE, vocab: int = VOCAB
) -> PublishedHead:
    levels = 3
    shapes: dict[str, Sequence[int]] = {}
    for level in range(levels):
        for block in range(blocks):
            shapes[f"{level}.{block}.linear.weight"] = (size, size)
            shapes[f"{level}.{block}.linear.bias"] = (size,)
        if projected:
            shapes[f"{level}.{blocks}.weight"] = (vocab, size)
    # As published: the config has the wrong number of heads.
    config = {"medusa_num_heads": 2, "medusa_num_layers": blocks, "model_type": "medusa"}
    return published("medusa", config, random_tensors(shapes, 4))


@cache
def speculator(tied: bool = False, scale_input: bool = False, levels: int = 3) -> PublishedHead:
    inner, shapes = 24, dict[str, Sequence[int]]()
    for i in range(levels):
        if tied and i > 1:
            break
        shapes[f"speculator.proj.{i}.weight"] = (inner, SIZE if i == 0 else inner)
        if tied and i:
            continue
        shapes[f"speculator.emb.{i}.weight"] = (VOCAB, inner)
        shapes[f"speculator.head.{i}.weight"] = (VOCAB, inner)
        shapes |= {f"speculator.ln.{i}.{name}": (inner,) for name in ("weight", "bias")}
    config = {
        "model_type": "mlp_speculator",
        "n_predict": levels,
        "emb_dim": SIZE,
        "inner_dim": inner,
        "tie_weights": tied,
        "scale_input": scale_input,
    }
    return published("mlp_speculator", config, random_tensors(shapes, 5))


@torch.no_grad()
def states_of(model: PreTrainedModel, tokens: Sequence[int], layers: Sequence[int]) -> Tensor:
    """Return (T, n * H) hidden states of the target."""
    found = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    return torch.cat([found[layer][0] for layer in layers], dim=-1)


def medusa_reference(model: PreTrainedModel, head: PublishedHead) -> Reference:
    tensors = {k.removeprefix("medusa_head."): t for k, t in head.tensors.items()}
    blocks = sum(key.startswith("0.") and "linear.weight" in key for key in tensors)
    own: Any = model.get_output_embeddings()

    @torch.no_grad()
    def after(tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        # The last token has no hidden state yet.
        hidden = states_of(model, tokens[:-1], [-1])[-1]
        level = len(path)
        for block in range(blocks):
            weight, bias = (tensors[f"{level}.{block}.linear.{n}"] for n in ("weight", "bias"))
            hidden = hidden + F.silu(weight @ hidden + bias)
        return tensors.get(f"{level}.{blocks}.weight", own.weight) @ hidden

    return after


def speculator_reference(model: PreTrainedModel, head: PublishedHead) -> Reference:
    given = {k.removeprefix("speculator."): t for k, t in head.tensors.items()}
    levels, inner = head.config["n_predict"], head.config["inner_dim"]
    kept = 0.5 ** (0.5 / levels)
    added = math.sqrt((1 - kept**2) * inner / 2)

    def of(kind: str, level: int, name: str = "weight") -> Tensor:
        return next(
            given[f"{kind}.{i}.{name}"]
            for i in range(level, -1, -1)
            if f"{kind}.{i}.{name}" in given
        )

    def norm(x: Tensor) -> Tensor:
        return x / (x.square().mean() + 1e-6).sqrt()

    @torch.no_grad()
    def after(tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        state = states_of(model, tokens[:-1], [-1])[-1]
        if head.config["scale_input"]:
            state = norm(state) / math.sqrt(2)
        for level, token in enumerate([tokens[-1], *path]):
            mixed = of("proj", level) @ state * kept + of("emb", level)[token] * added
            state = F.gelu(norm(mixed / kept) * of("ln", level) + of("ln", level, "bias"))
        return of("head", level) @ state

    return after


@contextmanager
def watch_drafts() -> Iterator[list[tuple[DraftTree, list[list[int]], list[int]]]]:
    """Yield a list that gains (tree, committed tokens, unfinished rows) with every draft."""
    seen: list[Any] = []
    original = ProposalDrafter.draft

    def draft(self: ProposalDrafter, state: Any, limits: Any) -> DraftTree:
        tree = original(self, state, limits)
        seen.append((tree, [list(row) for row in state.tokens], list(state.unfinished)))
        return tree

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProposalDrafter, "draft", draft)
        yield seen


def check_against(reference: Reference, seen: list[Any], paths: Sequence[Sequence[int]]) -> int:
    """Compare drafts with a reference and return the number of compared nodes.

    `paths` are the requested rank paths.
    """
    compared = 0
    for tree, texts, unfinished in seen:
        for row in unfinished:
            root, *nodes = tree.nodes(row)
            tokens: dict[int, list[int]] = {root: []}
            ranks: dict[int, tuple[int, ...]] = {root: ()}
            lists: dict[int, Tensor] = {}
            for node in nodes:
                above = tree.parent[node]
                if above not in lists:
                    lists[above] = reference(texts[row], tokens[above])
                tokens[node] = [*tokens[above], tree.tokens[node]]
                own = lists[above][tree.tokens[node]]
                ranks[node] = (*ranks[above], int((lists[above] > own).sum()))
                chance = float(lists[above].softmax(-1)[tree.tokens[node]])
                assert abs(tree.node_probs[node] - chance) < 1e-5
                compared += 1
            depth = tree.height(row)
            if depth:
                wanted = {tuple(path) for path in paths if len(path) <= depth}
                assert set(ranks.values()) == {(), *wanted}
    return compared


def block_tensors(
    layers: int = 2,
    markov: str | None = None,
    confidence: bool = False,
    width: int = SIZE,
    own: int = 0,
    size: int = SIZE,
    vocab: int = VOCAB,
) -> dict[str, Tensor]:
    """Return random tensors of a block head.

    `own` is R, the size of its own output head with its own embedding; 0 for none.
    """
    inner = 40
    shapes: dict[str, Sequence[int]] = {
        "fc.weight": (width, len(LAYERS) * size),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(layers):
        shapes |= {
            f"layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (width,),
                "post_attention_layernorm": (width,),
                "self_attn.q_proj": (HEADS * WIDTH, width),
                "self_attn.k_proj": (KEYS * WIDTH, width),
                "self_attn.v_proj": (KEYS * WIDTH, width),
                "self_attn.o_proj": (width, HEADS * WIDTH),
                "self_attn.q_norm": (WIDTH,),
                "self_attn.k_norm": (WIDTH,),
                "mlp.gate_proj": (inner, width),
                "mlp.up_proj": (inner, width),
                "mlp.down_proj": (width, inner),
            }.items()
        }
    if markov:
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (own or vocab, RANK)
    if markov == "gated":
        shapes["markov_head.gate_proj.weight"] = (RANK, width + RANK)
        shapes["markov_head.gate_proj.bias"] = (RANK,)
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + width)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    if confidence:
        shapes["confidence_head.proj.weight"] = (1, width + (RANK if markov else 0))
        shapes["confidence_head.proj.bias"] = (1,)
    if own:
        shapes |= {"embed_tokens.weight": (vocab, width), "lm_head.weight": (own, width)}
    tensors = random_tensors(shapes, 6)
    if own < vocab and own:
        tokens = torch.randperm(vocab, generator=torch.Generator().manual_seed(8))[:own].sort()[0]
        tensors["d2t"] = tokens - torch.arange(own)
        tensors["t2d"] = torch.isin(torch.arange(vocab), tokens)
    return tensors


BODY: dict[str, Any] = {
    "hidden_size": SIZE,
    # As published: the tensors have another number of layers.
    "num_hidden_layers": 5,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}


@cache
def dflash(new: bool = True, **tensors: Any) -> PublishedHead:
    """Return a head in the layout of z-lab and SpecForge.

    Without `new` the block size is at the top level, as in older repositories.
    """
    inner = {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in LAYERS]}
    config = {"architectures": ["DFlashDraftModel"], **BODY, "dflash_config": inner}
    (inner if new else config)["block_size"] = BLOCK
    return published("dflash", config, block_tensors(**tensors))


@cache
def dflash2(
    layers: tuple[int, ...] = tuple(LAYERS), size: int = SIZE, vocab: int = VOCAB, taps: int = TAPS
) -> PublishedHead:
    """Return a DFlash 2 head in the layout of z-lab and incoai."""
    inner = {
        "block_size": BLOCK,
        "mask_token_id": vocab - 1,
        "target_layer_ids": [i - 1 for i in layers],
        "conv_kernel_size": taps,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": CANDIDATES,
    }
    config = {
        "architectures": ["DFlash2DraftModel"],
        **BODY,
        "is_causal": False,
        "dflash_config": inner,
    }
    shapes: dict[str, Sequence[int]] = {}
    for name in (f"layers.{i}.{part}_conv." for i in range(2) for part in ("attention", "mlp")):
        shapes[name + "base_kernel"] = (2, taps, size)
        shapes[name + "kernel_projection.weight"] = (2 * taps * size // GROUP, size)
    for name in ("predecessor", "successor"):
        shapes[f"candidate_selector.{name}_codebook"] = (vocab, RANK)
    shapes["candidate_selector.hidden_projection.weight"] = (RANK, size)
    # With these scales transitions reorder the candidates, and states do not grow.
    scales = {"codebook": 4.0, "kernel_projection": 0.3}
    added = {
        key: tensor * next((scale for part, scale in scales.items() if part in key), 1.0)
        for key, tensor in random_tensors(shapes, 9).items()
    }
    tensors = block_tensors(width=size, size=size, vocab=vocab)
    return published("dflash2", config, {**tensors, **added})


@cache
def muse(
    layers: tuple[int, ...] = tuple(LAYERS), size: int = SIZE, vocab: int = VOCAB
) -> PublishedHead:
    """Return a head in the layout of transformers, `muse_glimmer_assistant`."""
    config = {
        "architectures": ["MuseGlimmerAssistantModel"],
        "model_type": "muse_glimmer_assistant",
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "sliding_window": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "block_size": BLOCK,
        "mask_token_id": vocab - 1,
        "target_layer_ids": [i - 1 for i in layers],
    }
    tensors = block_tensors(width=size, size=size, vocab=vocab)
    names = {"fc.weight": "encoder.fc.weight"}
    names["hidden_norm.weight"] = "encoder.output_norm_enc.weight"
    return published("dflash", config, {names.get(key, key): t for key, t in tensors.items()})


@cache
def deepspec(
    kind: str | None = "vanilla",
    confidence: bool = True,
    layers: tuple[int, ...] = tuple(LAYERS),
    size: int = SIZE,
    vocab: int = VOCAB,
) -> PublishedHead:
    """Return a head in DeepSpec's layout: a flat config, own copies of embedding and head."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **BODY,
        "block_size": BLOCK,
        "mask_token_id": vocab - 1,
        "target_layer_ids": [i - 1 for i in layers],
        "markov_rank": RANK if kind else 0,
    }
    tensors = block_tensors(2, kind, confidence, size, vocab, size=size, vocab=vocab)
    return published("dspark", config, tensors)


@cache
def speculators(family: str = "dspark", kind: str | None = "vanilla", **more: Any) -> PublishedHead:
    """Return a head in vLLM's layout: hidden states by index, a reduced vocabulary, own width."""
    config = {
        "speculators_model_type": family,
        "transformer_layer_config": {**BODY, "model_type": "qwen3"},
        "aux_hidden_state_layer_ids": LAYERS,
        "mask_token_id": MASK,
        "block_size": BLOCK,
        **more,
    }
    tensors = block_tensors(2, kind, kind is not None, width=24, own=60)
    return published(family, config, tensors)


def block_reference(
    model: PreTrainedModel,
    head: PublishedHead,
    from_anchor: bool,
    kinds: Sequence[tuple[int | None, bool]] = ((None, False),) * 2,
    begin: int = 0,
) -> Reference:
    """Return the reference of a block head.

    `kinds` are (window, causal) of its layers; it has the text from position `begin` on.
    """
    t = head.tensors
    own: Any = model.get_output_embeddings()
    embedding = t.get("embed_tokens.weight", model.get_input_embeddings().weight)

    @cache
    @torch.no_grad()
    def outputs(tokens: tuple[int, ...]) -> Tensor:
        states = states_of(model, tokens[:-1], LAYERS)[begin:]
        return block_outputs(t, states, embedding[[tokens[-1], *[MASK] * (BLOCK - 1)]], kinds)

    @torch.no_grad()
    def after(tokens: Sequence[int], path: Sequence[int]) -> Tensor:
        block = outputs(tuple(tokens))
        state, bias = torch.zeros(RANK), None
        texts = [tokens[-1], *path]
        positions = list(range(0 if from_anchor else 1, BLOCK))[: len(texts)]
        if "markov_head.joint_proj.weight" in t and not from_anchor:
            _, state = markov_bias(t, tokens[-1], block[0], state)
        if "markov_head.markov_w1.weight" in t:
            for token, position in zip(texts, positions, strict=True):
                bias, state = markov_bias(t, token, block[position], state)
        few = t.get("lm_head.weight", own.weight) @ block[positions[-1]]
        few = few if bias is None else few + bias
        if "candidate_selector.predecessor_codebook" in t:
            few = selected(t, few, block[positions[-1]], texts[-1])
        if "d2t" not in t:
            return few
        logits = torch.full((VOCAB,), float("-inf"))
        logits[t["d2t"] + torch.arange(len(few))] = few
        return logits

    return after


def markov_bias(
    t: Mapping[str, Tensor], token: int, output: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    before = t["markov_head.markov_w1.weight"][token]
    if "markov_head.gate_proj.weight" in t:
        read = torch.cat([output, before])
        gate = t["markov_head.gate_proj.weight"] @ read + t["markov_head.gate_proj.bias"]
        before = gate.sigmoid() * before
    if "markov_head.joint_proj.weight" in t:
        read = torch.cat([state, before, output])
        joint = t["markov_head.joint_proj.weight"] @ read + t["markov_head.joint_proj.bias"]
        gate, candidate, out = joint.split(RANK)
        state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
        before = out.tanh()
    return t["markov_head.markov_w2.weight"] @ before, state


def selected(t: Mapping[str, Tensor], logits: Tensor, output: Tensor, token: int) -> Tensor:
    """Return (V,) logits of DFlash 2 at a position after a token."""
    before = t["candidate_selector.predecessor_codebook"][token]
    read = before * (t["candidate_selector.hidden_projection.weight"] @ output)
    found = torch.full_like(logits, -torch.inf)
    for index in logits.argsort(descending=True)[:CANDIDATES]:
        found[index] = logits[index] + read @ t["candidate_selector.successor_codebook"][index]
    return found


def convolved(t: Mapping[str, Tensor], name: str, side: int, x: Tensor, normed: Tensor) -> Tensor:
    """Return the (b, width) convolution of a block, computed per position and group.

    Heads without convolutions return `x`.
    """
    if name + "base_kernel" not in t:
        return x
    kernel = t[name + "base_kernel"][side]
    groups = x.shape[1] // GROUP
    found = torch.zeros_like(x)
    for index, state in enumerate(normed):
        deltas = (t[name + "kernel_projection.weight"] @ state).view(2, len(kernel), groups)[side]
        for tap in range(min(len(kernel), index + 1)):
            for group in range(groups):
                channels = slice(group * GROUP, (group + 1) * GROUP)
                factor = kernel[tap, channels] + deltas[tap, group]
                found[index, channels] += factor * x[index - tap, channels]
    return found


def block_outputs(
    t: Mapping[str, Tensor],
    states: Tensor,
    block: Tensor,
    kinds: Sequence[tuple[int | None, bool]],
) -> Tensor:
    """Return (b, width) outputs of a block after a context of (T, n * H) states."""
    context = rms(states @ t["fc.weight"].T, t["hidden_norm.weight"])
    known, x = len(context), block
    positions = torch.arange(known + len(block))
    for layer, (window, causal) in enumerate(kinds):
        p = f"layers.{layer}."
        normed = rms(x, t[p + "input_layernorm.weight"])
        y = convolved(t, p + "attention_conv.", 0, normed, normed)
        both = torch.cat([context, y])
        q = split(y, t, p, "q", positions[known:])
        k = split(both, t, p, "k", positions).repeat_interleave(HEADS // KEYS, dim=0)
        v = split(both, t, p, "v", None).repeat_interleave(HEADS // KEYS, dim=0)
        ahead = positions[None] - positions[known:, None]
        hidden = (ahead > 0) & causal
        if window is not None:
            hidden = hidden | (ahead <= -window)
        scores = (q @ k.transpose(1, 2) / math.sqrt(WIDTH)).masked_fill(hidden, float("-inf"))
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        mixed = mixed @ t[p + "self_attn.o_proj.weight"].T
        x = x + convolved(t, p + "attention_conv.", 1, mixed, normed)
        normed = rms(x, t[p + "post_attention_layernorm.weight"])
        y = convolved(t, p + "mlp_conv.", 0, normed, normed)
        gate, up = (y @ t[p + f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        mixed = (F.silu(gate) * up) @ t[p + "mlp.down_proj.weight"].T
        x = x + convolved(t, p + "mlp_conv.", 1, mixed, normed)
    return rms(x, t["norm.weight"])


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def split(
    x: Tensor, t: Mapping[str, Tensor], prefix: str, name: str, positions: Tensor | None
) -> Tensor:
    """Return (heads, T, D) queries, keys or values; all but values are normed and rotated."""
    x = (x @ t[f"{prefix}self_attn.{name}_proj.weight"].T).view(len(x), -1, WIDTH).transpose(0, 1)
    if positions is None:
        return x
    x = rms(x, t[f"{prefix}self_attn.{name}_norm.weight"])
    angles = positions[:, None] * 5000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat([f, f], dim=-1) for f in (angles.cos(), angles.sin()))
    half = WIDTH // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin
