"""Training of a DFlash head on the target's own answers (`hf-spec train block`).

Blocks start at random anchors of the answers, all of a text in one pass
(`hf_spec.methods.block.anchored`). Every mask position learns the target's distribution of its
token, and early tokens weigh more, since a wrong one discards all behind it (Chen et al. 2026,
arXiv 2602.06036)::

    loss = sum_j w_j CE(target distribution over the R draft tokens, output j),  j = 1 ... b - 1
    w_j  = exp(-(j - 1) / decay) / sum_j exp(-(j - 1) / decay)

Embedding and output head are the target's and stay frozen, as in the paper. Ours: the teacher's
distribution instead of the token alone, and a draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.block.anchored import anchored_blocks, use_plain_attention
from hf_spec.methods.block.head import BlockHead
from hf_spec.methods.block.layouts import build_block_head
from hf_spec.methods.block.settings import BLOCK_RUN, BlockTrainSettings
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.feature_pairs.teacher import Teacher, cross_entropy, output_rows
from hf_spec.training.features import Text, fused_layers
from hf_spec.training.heads import (
    INIT_STD,
    CardText,
    HeadRun,
    as_stored,
    check_family,
    draft_vocab_tensors,
    falling_weights,
    layer_config,
    run_head_training,
    speculators_config,
)
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.pairs import Pairs, read_pairs
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch

FAMILY = "dflash"
CARD = CardText("A DFlash head", "block", "vLLM's speculators", "dflash", "block")
# Modules that are trained; embedding and output head are the target's.
TRAINED = ("fc.", "hidden_norm.", "layers.", "norm.")
# Blocks of a text per pass of the evaluation.
EVALUATED_BLOCKS = 64


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train block`."""
    return run_head_training(job, fused_layers(job.target), train_block, start_head)


def train_block(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: BlockTrainSettings,
    run: TrainSettings = BLOCK_RUN,
    start: PublishedHead | None = None,
) -> dict[str, float]:
    """Train a DFlash head on a frozen target's answers and write it to `folder`.

    See `hf_spec.methods.eagle.training.train_eagle`, which reads the same features. The vocabulary
    of `start` is kept.
    """
    check_plain_head(model)
    training = HeadRun(model, texts, settings, run, start)
    torch.manual_seed(run.seed)
    initial = new_head(model, training.learned, settings, folder) if start is None else start
    head = start_head(initial, model, settings)
    trained = trained_weights(head)
    metrics = training.train(trained, BlockLoss(head, model, settings), folder)
    training.write(folder, *layout(head, initial, as_stored(trained), model), CARD)
    return metrics


def new_head(
    model: PreTrainedModel, texts: Sequence[Text], settings: BlockTrainSettings, folder: Path
) -> PublishedHead:
    """Return a head with random layers, whose context is the state of the high aux layer.

    Its draft vocabulary are the most frequent tokens of the answers in `texts`.
    """
    answers = (text.response for text in texts)
    vocabulary = answer_vocabulary(model, answers, settings.vocabulary_size)
    layers = fused_layers(model)[:-1]
    sizes = layer_config(model, settings.mlp_size, settings.num_layers)
    mask = num_embeddings(model) - 1 if settings.mask_token is None else settings.mask_token
    config = {
        **sizes,
        "aux_hidden_state_layer_ids": list(layers),
        "block_size": settings.block_size,
        "mask_token_id": mask,
        "sample_from_anchor": False,
    }
    width = sizes["hidden_size"]
    chosen = [torch.zeros(width, width * (len(layers) - 1)), torch.eye(width)]
    tensors = {"fc.weight": torch.cat(chosen, dim=1), **_initial_layers(sizes)}
    tensors["lm_head.weight"] = output_rows(model, vocabulary)
    tensors |= draft_vocab_tensors(vocabulary, num_embeddings(model))
    return PublishedHead(FAMILY, config, tensors, folder, str(folder))


def start_head(
    start: PublishedHead, model: PreTrainedModel, settings: BlockTrainSettings
) -> BlockHead:
    """Return the head to train; `OptionError` or `AssistantError` if it does not fit."""
    check_family(start, (FAMILY,))
    head = build_block_head(start, model)
    what = f"the head to start from, {start.name!r},"
    attention: Any = [layer.self_attn for layer in head.layers]
    if any(head.shape.causal) or any(part.sliding_window is not None for part in attention):
        raise OptionError(f"{what} has sliding or causal layers, which training does not support")
    if head.markov is not None or head.selector is not None or head.confidence is not None:
        raise OptionError(f"{what} is not a plain DFlash head, the only kind that can be trained")
    if head.shape.hidden_layers != fused_layers(model)[:-1]:
        raise OptionError(
            f"{what} reads the layers {head.shape.hidden_layers}; training reads "
            f"{fused_layers(model)[:-1]}"
        )
    sizes = head.shape.block_size, len(head.layers)
    if sizes != (settings.block_size, settings.num_layers):
        raise OptionError(
            f"{what} has blocks of {sizes[0]} and {sizes[1]} layers, not {settings.block_size} and "
            f"{settings.num_layers}; set block_size={sizes[0]} and num_layers={sizes[1]}"
        )
    use_plain_attention(head)
    return head


def trained_weights(head: BlockHead) -> dict[str, nn.Parameter]:
    """Return the trained weights by the names that all layouts share."""
    return {name: p for name, p in head.named_parameters() if name.startswith(TRAINED)}


def layout(
    head: BlockHead, initial: PublishedHead, trained: Mapping[str, Tensor], model: PreTrainedModel
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a trained head in the layout of speculators."""
    attention: Any = head.layers[0].self_attn
    vocabulary, shape = head.output.vocabulary, head.shape
    tensors = {name: t for name, t in initial.tensors.items() if name == "embed_tokens.weight"}
    tensors |= trained
    scores: Any = head.output.scores
    tensors["lm_head.weight"] = scores.weight.detach().to(trained["fc.weight"].dtype)
    tensors |= draft_vocab_tensors(vocabulary, num_embeddings(model))
    layers = attention.config.to_diff_dict()
    layers |= {"vocab_size": num_embeddings(model), "tie_word_embeddings": False}
    config = {
        "architectures": ["DFlashDraftModel"],
        **speculators_config(FAMILY, model, shape.num_levels),
        "draft_vocab_size": len(tensors["lm_head.weight"]),
        "block_size": shape.block_size,
        "mask_token_id": shape.mask_token_id,
        "aux_hidden_state_layer_ids": list(shape.hidden_layers),
        "sample_from_anchor": shape.from_anchor,
        "target_hidden_size": model.config.get_text_config().hidden_size,
        "transformer_layer_config": {**layers, "model_type": "qwen3"},
    }
    return config, tensors


class BlockLoss:
    """Loss of a DFlash head on blocks at random anchors, with a frozen target as the teacher."""

    def __init__(self, head: BlockHead, target: PreTrainedModel, settings: BlockTrainSettings):
        self.head, self.target, self.settings = head, target, settings
        self.teacher = Teacher(target, head.output.vocabulary)
        self.layers = fused_layers(target)
        weights = falling_weights(math.exp(-1 / settings.decay), head.shape.num_levels)
        self.weights = torch.tensor(weights, device=target.device)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """Return the loss summed over the anchors, and their number."""
        pairs = read_pairs(self.target, batch.items, 1, self.settings.max_context, self.layers)
        anchors, real = draw_anchors(pairs, self.settings.anchors, batch.seed)
        outputs = self._outputs(pairs, anchors)
        known = real[..., None] & self._known(pairs, anchors)
        row, block, level = known.nonzero(as_tuple=True)
        probs = self.teacher.probs_at(pairs, row, anchors[row, block] + level)
        with self.teacher.autocast():
            logits = self.head.logits(outputs[row, block, level])
        loss = cross_entropy(logits, probs) * self.weights[level]
        return loss.sum(), int(real.sum())

    @torch.no_grad()
    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return per text (answer tokens, levels) bool: which tokens of greedy drafts are correct.

        Row n is the draft whose first token is answer token n. Tokens past the text count as wrong.
        """
        pairs = read_pairs(self.target, texts, 1, None, self.layers)
        longest = max(pairs.counts)
        first = torch.tensor([first for first, _ in pairs.span], device=pairs.tokens.device)
        last = torch.tensor([stop - 1 for _, stop in pairs.span], device=pairs.tokens.device)
        steps = torch.arange(longest, device=pairs.tokens.device)
        anchors = (first[:, None] + steps).minimum(last[:, None])
        parts = [self._correct(pairs, part) for part in anchors.split(EVALUATED_BLOCKS, dim=1)]
        correct = torch.cat(parts, dim=1).cpu()
        return [correct[row, :count] for row, count in enumerate(pairs.counts)]

    def _correct(self, pairs: Pairs, anchors: Tensor) -> Tensor:
        """Return (B, A, levels) bool: correct tokens of the blocks at (B, A) anchors."""
        outputs, known = self._outputs(pairs, anchors), self._known(pairs, anchors)
        rows = torch.arange(len(anchors), device=anchors.device)[:, None]
        for level in range(self.head.shape.num_levels):
            with self.teacher.autocast():
                chosen = self.head.logits(outputs[:, :, level]).argmax(dim=-1)
            drawn = self.head.output.tokens(chosen)
            answers = (anchors + level + 1).clamp_max(pairs.tokens.shape[1] - 1)
            known[..., level] &= drawn == pairs.tokens[rows, answers]
        return known

    def _outputs(self, pairs: Pairs, anchors: Tensor) -> Tensor:
        """Return the (B, A, levels, width) outputs that draft, of blocks at (B, A) anchors."""
        states = pairs.features.chunk(len(self.layers), dim=-1)[:-1]
        roots = pairs.tokens.gather(1, anchors)
        with self.teacher.autocast():
            outputs = anchored_blocks(self.head, states, roots, anchors)
        return outputs if self.head.shape.from_anchor else outputs[:, :, 1:]

    def _known(self, pairs: Pairs, anchors: Tensor) -> Tensor:
        """Return (B, A, levels) bool: levels whose token is in the text."""
        stops = torch.tensor([stop for _, stop in pairs.span], device=anchors.device)
        levels = torch.arange(self.head.shape.num_levels, device=anchors.device)
        return anchors[..., None] + levels < stops[:, None, None]


def draw_anchors(pairs: Pairs, most: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw up to `most` different learned positions of each text as anchors.

    Returns:
        (B, A) int64 anchors, and (B, A) bool: False for padding of texts with fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    count = max(1, min(most, max(pairs.counts)))
    anchors = torch.zeros(len(pairs.span), count, dtype=torch.long)
    real = torch.zeros(anchors.shape, dtype=torch.bool)
    for row, (first, stop) in enumerate(pairs.span):
        drawn = torch.randperm(stop - first, generator=generator)[:count] + first
        anchors[row, : len(drawn)], real[row, : len(drawn)] = drawn.sort().values, True
    device = pairs.tokens.device
    return anchors.to(device), real.to(device)


def _initial_layers(sizes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the weights of random layers and norms."""
    width, inner, dim = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    queries = sizes["num_attention_heads"] * dim
    keys = sizes["num_key_value_heads"] * dim
    matrices = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    norms = {
        "input_layernorm": width,
        "post_attention_layernorm": width,
        "self_attn.q_norm": dim,
        "self_attn.k_norm": dim,
    }
    tensors = {name: torch.ones(width) for name in ("hidden_norm.weight", "norm.weight")}
    for layer in range(sizes["num_hidden_layers"]):
        for name, shape in matrices.items():
            tensors[f"layers.{layer}.{name}.weight"] = torch.randn(shape) * INIT_STD
        for name, size in norms.items():
            tensors[f"layers.{layer}.{name}.weight"] = torch.ones(size)
    return tensors
