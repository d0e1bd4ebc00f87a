"""Training of an EAGLE-3 head on the target's own answers (`hf-spec train eagle`).

The head learns the target's next-token distribution from hidden states of a low, a middle and a
high layer; features are not a training goal. From the second draft step on, its own output replaces
the feature that only the target could compute. Training unrolls several such steps, so that later
draft tokens stay accurate ("training-time test", Li et al. 2025, arXiv 2503.01840, section 3.2)::

    loss = sum_s w_s CE(target distribution over the R draft tokens, head after s steps)
    w_s  = step_weight^s / sum_s step_weight^s

Ours: the head starts as the target's last layer. Heads are saved in the layout of vLLM's
speculators, which other engines load too, and are read back like any published head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, PreTrainedModel

from hf_spec.adapters.adapter import base_name, is_hub_id
from hf_spec.adapters.card import GENERATED
from hf_spec.adapters.published import PublishedHead, known_head, write_published
from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.truncated import last_layers
from hf_spec.methods.eagle.head import STRATEGY, EagleHead, build
from hf_spec.methods.eagle.layouts import Layout, Verifier, for_vllm
from hf_spec.methods.eagle.settings import EAGLE_RUN, EagleTrainSettings
from hf_spec.methods.eagle.spec import canonical_names, read_spec
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead, check_plain_head
from hf_spec.methods.feature_pairs.training_pairs import Pairs, cut_prompt, read_pairs
from hf_spec.methods.loading import resolve_published
from hf_spec.training.answers import learned_from
from hf_spec.training.features import LAST, Text, fused_layers, num_features
from hf_spec.training.held_out import acceptance, learned_and_held
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.rollouts import OnlineTraining
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch, micro_batches, processes, train

# Texts per forward pass of the evaluation.
EVALUATION_BATCH = 8
# Standard deviation of weights without a counterpart in the target, as in transformers.
INIT_STD = 0.02


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train eagle`."""
    start = None if job.options.init is None else known_head(job.options.init)
    if start is not None:
        # Computing the features takes long.
        check_start(start, job.target, job.settings)
    texts = job.texts(fused_layers(job.target))
    return TrainingResult(train_eagle(job.target, texts, job.out, job.settings, job.run, start))


def train_eagle(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: EagleTrainSettings,
    run: TrainSettings = EAGLE_RUN,
    start: PublishedHead | None = None,
) -> dict[str, float]:
    """Train a head on a frozen target's answers and write it to `folder`.

    Checkpoint and metrics are written to its `training` folder. Several answers to one prompt share
    an id; stored features must be those of `fused_layers`. Training continues from `start`, a head
    in any layout with the same draft vocabulary, by default from the target's last layer. Returns
    metrics on the held-out texts, see `acceptance`.

    Raises:
        UnsupportedError: if the target changes its logits after the head.
        OptionError: if the training or the held-out set is empty, or `start` does not fit.
        AssistantError: if `start` belongs to another model.
    """
    check_plain_head(model)
    if start is not None:
        check_start(start, model, settings)
    learned, held = learned_and_held(texts, settings.held_back, "texts")
    torch.manual_seed(run.seed)
    initial = new_head(model, learned, settings, folder) if start is None else start
    head = build(initial, model)
    trained = dict(head.attention.named_parameters())
    for parameter in trained.values():
        parameter.requires_grad_(True)
    loss = StepsLoss(head, model, settings)
    lengths = [
        num_features(t.response) - cut_prompt(t.response, settings.max_context) for t in learned
    ]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        batches = [held[i : i + EVALUATION_BATCH] for i in range(0, len(held), EVALUATION_BATCH)]
        return acceptance([match for batch in batches for match in loss.matches(batch)])

    # The name only: a published head must not carry local paths.
    started = None if start is None else Path(start.name).name
    record = {**asdict(settings), "texts": len(texts), "start": started}
    sources = learned_from(model, [text.response for text in texts])
    metrics = train(
        trained, loss, epochs, run, folder / "training", evaluate, {**record, **sources}
    )
    if processes().is_main_process:
        # Initial tensors include the draft vocabulary, which is not trained.
        tensors = canonical_names(initial.tensors)
        tensors |= {name: weight.detach().bfloat16() for name, weight in trained.items()}
        config, tensors = layout(head, tensors, model, settings.steps)
        config["hf_spec"] = {"training": {**record, **asdict(run)}, "held_back": metrics}
        card = _card(base_name(model), folder, metrics)
        write_published(folder, config, tensors, card)
    return metrics


def online_training(model: PreTrainedModel, assistant: Any) -> OnlineTraining:
    """Return how an EAGLE-3 head learns from rollouts of `model`."""
    check_plain_head(model)
    head: EagleHead = resolve_published(STRATEGY, assistant, model, ("eagle3",))
    settings = EagleTrainSettings(max_context=None)
    return OnlineTraining(
        head=head,
        layers=(*head.hidden_layers, *LAST),
        trained=lambda: list(head.attention.parameters()),
        make_loss=lambda: StepsLoss(head, model, settings),
    )


def new_head(
    model: PreTrainedModel, texts: Sequence[Text], settings: EagleTrainSettings, folder: Path
) -> PublishedHead:
    """Return an untrained head: the target's last layer, reading the state of the high aux layer.

    Its draft vocabulary are the most frequent tokens of the answers in `texts`.
    """
    vocabulary = answer_vocabulary(
        model, (text.response for text in texts), settings.vocabulary_size
    )
    config: Any = model.config.get_text_config()
    width, heads = config.hidden_size, config.num_attention_heads
    head_config = {
        "hidden_size": width,
        "intermediate_size": settings.mlp_size or config.intermediate_size,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or width // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0),
        "max_position_embeddings": config.max_position_embeddings,
        "eagle_aux_hidden_state_layer_ids": list(fused_layers(model)[:-1]),
    }
    scores = FewTokensHead(model.get_output_embeddings(), vocabulary).scores
    tensors = _initial_weights(model, head_config)
    tensors["lm_head.weight"] = scores.weight.detach().clone()
    if vocabulary is not None:
        tensors["d2t"] = vocabulary.cpu() - torch.arange(len(vocabulary))
    return PublishedHead("eagle3", head_config, tensors, folder, str(folder))


def layout(
    head: EagleHead, tensors: Mapping[str, Tensor], model: PreTrainedModel, steps: int
) -> Layout:
    """Return config and `tensors` of a head in vLLM's layout, set to draft `steps` tokens."""
    text = model.config.get_text_config()
    verifier = Verifier(base_name(model), (type(model).__name__,), text)
    return for_vllm(head.spec, tensors, verifier, steps)


def check_start(start: PublishedHead, model: PreTrainedModel, settings: EagleTrainSettings) -> None:
    """Raise `OptionError` or `AssistantError` if training cannot continue from a head."""
    what = f"the head to start from, {start.name!r},"
    if start.family != "eagle3":
        raise OptionError(f"{what} is of the family {start.family!r}, not 'eagle3'")
    tensors = canonical_names(start.tensors)
    spec = read_spec(start, tensors, model.config.get_text_config())
    layers = fused_layers(model)[:-1]
    if spec.hidden_layers != layers:
        raise OptionError(f"{what} reads the layers {spec.hidden_layers}; training reads {layers}")
    full, requested = num_embeddings(model), settings.vocabulary_size
    size = min(len(tensors.get("lm_head.weight", ())) or full, full)
    # The answers may have had fewer different tokens than the setting allowed.
    if requested not in (size, _recorded_vocabulary_size(start)) and (requested or full) != size:
        raise OptionError(
            f"{what} drafts {size} of {full} tokens, which cannot change, but vocabulary_size is "
            f"{requested}; set it to {size if size < full else None}"
        )
    inner_size = spec.layer["intermediate_size"]
    if settings.mlp_size not in (None, inner_size):
        raise OptionError(
            f"{what} has an MLP of width {inner_size}, but mlp_size is {settings.mlp_size}; "
            "leave mlp_size out"
        )


def _recorded_vocabulary_size(start: PublishedHead) -> object:
    """Return the setting `vocabulary_size` that a head was trained with here, or ()."""
    record = start.config.get("hf_spec")
    training = record.get("training") if isinstance(record, dict) else None
    return training.get("vocabulary_size", ()) if isinstance(training, dict) else ()


class StepsLoss:
    """Loss of a head over several draft steps, with a frozen target as the teacher."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, settings: EagleTrainSettings):
        self.head, self.target, self.settings = head, target, settings
        vocabulary = head.head.vocabulary
        self.teacher = FewTokensHead(target.get_output_embeddings(), vocabulary)
        self.layers = (*head.hidden_layers, *LAST)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """Return the loss summed over the learned positions, and their number."""
        pairs = read_pairs(self.target, batch.items, 1, self.settings.max_context, self.layers)
        width = self.target.config.get_text_config().hidden_size
        # The last of the fused layers is the state after the final norm, which the head reads.
        states = pairs.features[pairs.rows, pairs.places + 1, -width:]
        with torch.no_grad(), self._autocast():
            logits = self.teacher.draft_logits(states.to(self.target.dtype))
            target_probs = logits.float().softmax(dim=-1)
        weights = [self.settings.step_weight**step for step in range(self.settings.steps)]
        total = torch.zeros((), device=states.device)
        for step, outputs in enumerate(self._steps(pairs)):
            # Positions before `step` have no draft of that depth.
            deep = pairs.places >= step
            with self._autocast():
                logits = self.head.head.draft_logits(outputs[pairs.rows[deep], pairs.places[deep]])
            entropy = F.cross_entropy(logits.float(), target_probs[deep], reduction="sum")
            total = total + entropy * (weights[step] / sum(weights))
        return total, len(states)

    @torch.no_grad()
    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return per text (answer tokens, steps) bool: which tokens of greedy drafts are correct.

        Row n is the draft whose first token is answer token n. Each step reads the text's tokens,
        which equal the draft's as long as it is correct. Tokens past the text count as wrong.
        """
        pairs = read_pairs(self.target, texts, 1, None, self.layers)
        answers = pairs.tokens[pairs.rows, pairs.places + 1]
        size = (len(texts), pairs.tokens.shape[1] + self.settings.steps, self.settings.steps)
        correct = torch.zeros(size, dtype=torch.bool, device=answers.device)
        for step, outputs in enumerate(self._steps(pairs)):
            with self._autocast():
                logits = self.head.head.draft_logits(outputs[pairs.rows, pairs.places])
            hit = self.head.head.tokens(logits.argmax(dim=-1)) == answers
            # The draft with this token as number `step` began `step` positions earlier.
            deep = pairs.places >= step
            correct[pairs.rows[deep], pairs.places[deep] - step, step] = hit[deep]
        return [correct[row, first:stop].cpu() for row, (first, stop) in enumerate(pairs.span)]

    def _steps(self, pairs: Pairs) -> Iterator[Tensor]:
        """Yield the (B, T, h) outputs of each step of `draft_steps`."""
        states = pairs.features.chunk(len(self.layers), dim=-1)[:-1]
        with self._autocast():
            features = self.head.fuse(states)
        steps = draft_steps(self.head, pairs.tokens, features, self.settings.steps)
        for _ in range(self.settings.steps):
            with self._autocast():
                outputs = next(steps)
            yield outputs

    def _autocast(self) -> torch.autocast:
        half = self.target.dtype in (torch.bfloat16, torch.float16)
        return torch.autocast(self.target.device.type, torch.bfloat16, enabled=half)


def draft_steps(
    head: EagleHead, tokens: Tensor, features: Tensor, num_steps: int
) -> Iterator[Tensor]:
    """Run the draft steps from every position of whole texts at once; yield (B, T, h) outputs.

    In step s, position i is the s-th draft pair after the true pairs 0 to i - s. Its feature is the
    output of step s - 1 at position i - 1. It sees the true pairs and its own draft ancestors, one
    per earlier step. The inputs are (B, T) int64 t_{i+1}, and (B, T, h) from `EagleHead.fuse`.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    back = positions[:, None] - positions
    cache = DynamicCache()
    for step in range(num_steps):
        # The cache holds the keys of step 0 (true pairs), then those of each later step.
        seen = [back >= step, *(back == step - earlier for earlier in range(1, step + 1))]
        mixed, _ = head.mix(tokens, features)
        outputs = head.attend(
            mixed,
            attention_mask=torch.cat(seen, dim=-1)[None, None],
            position_ids=positions[None],
            **{CACHE_NAME: cache},
        )
        yield outputs
        features = torch.cat([features[:, :1], outputs[:, :-1].to(features.dtype)], dim=1)


def _initial_weights(model: PreTrainedModel, layer: dict[str, Any]) -> dict[str, Tensor]:
    """Return the target's last layer where shapes agree; `fc` selects the high aux layer."""
    last: Any = last_layers(model, 1)
    weights = {
        name.partition("layers.0.")[2]: weight.detach().float()
        for name, weight in last.named_parameters()
    }
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    queries, keys = (
        layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    tensors: dict[str, Tensor] = {}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        wide = torch.randn(rows, 2 * width) * INIT_STD
        weight = weights.get(f"self_attn.{name}.weight")
        if weight is not None and weight.shape == (rows, width):
            wide[:, width:] = weight
        tensors[f"layers.0.self_attn.{name}.weight"] = wide
    plain = {
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    for name, shape in plain.items():
        tensors[f"layers.0.{name}.weight"] = _cut_to(weights.get(f"{name}.weight"), shape)
    ones = torch.ones(width, device=model.device, dtype=model.dtype)
    norms = {
        "layers.0.hidden_norm": getattr(last.layers[0], "input_layernorm", None),
        "layers.0.input_layernorm": None,
        "layers.0.post_attention_layernorm": getattr(
            last.layers[0], "post_attention_layernorm", None
        ),
        "norm": getattr(last, "norm", None),
    }
    for name, norm in norms.items():
        # The norm of ones is its weight, whether stored as such or as an offset from one.
        tensors[f"{name}.weight"] = ones if norm is None else norm(ones).detach()
    return {**tensors, "fc.weight": torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)}


def _cut_to(weight: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Return the first rows and columns of `weight`, or random values if it is too small."""
    if weight is None or weight.shape[0] < shape[0] or weight.shape[1] < shape[1]:
        return torch.randn(shape) * INIT_STD
    return weight[: shape[0], : shape[1]].clone()


def _card(base: str, folder: Path, metrics: Mapping[str, float]) -> str:
    """Return the model card."""
    rows = "\n".join(f"| `{name}` | {value:.4f} |" for name, value in metrics.items())
    return f"""---
{f"base_model: {base}" if is_hub_id(base) else "library_name: hf_spec"}
tags:
- speculative-decoding
- eagle3
---

{GENERATED}

# An EAGLE-3 head for {base}

Written by `hf-spec train eagle` in the layout of vLLM's speculators; see `config.json` for options.

```python
import hf_spec  # adds spec_strategy= and assistant= to generate()

model.generate(**inputs, spec_strategy="eagle", assistant={folder.name!r}, max_new_tokens=64)
```

## Held-out texts

| | |
|---|---|
{rows}
"""
