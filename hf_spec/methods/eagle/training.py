"""Training of an EAGLE-3 head on the target's own answers (`hf-spec train eagle`).

The head reads states of a low, a middle and a high layer, and learns what the target says next, not
its features. From the second draft step on, its own output stands in for the feature that only the
target could give; training runs several such steps in a row, so that drafts stay good as they grow
("training-time test", Li et al. 2025, arXiv 2503.01840, section 3.2). What is saved has the layout
of vLLM's speculators, which other engines load too, and is read back as any published head.
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

from hf_spec.adapters.base_name import base_name, is_hub_id
from hf_spec.adapters.card import GENERATED
from hf_spec.adapters.published import PublishedHead, write_published
from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.truncated import last_layers
from hf_spec.methods.eagle.head import EagleHead, build
from hf_spec.methods.eagle.layouts import Layout, Verifier, for_vllm
from hf_spec.methods.eagle.settings import EAGLE_RUN, EagleTrainSettings
from hf_spec.methods.eagle.spec import normal_names, read_spec
from hf_spec.methods.falcon.csgd import Pairs, cut_prompt, read_pairs
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead, check_plain_head
from hf_spec.training.answers import learned_from
from hf_spec.training.features import Text, fused_layers, num_features
from hf_spec.training.held_back import acceptance, learned_and_held
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch, micro_batches, processes, train

# Texts of one forward when the held-back ones are evaluated.
EVALUATED = 8
# Of weights that have no like in the target, as transformers starts its own.
DEVIATION = 0.02


def train_eagle(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: EagleTrainSettings,
    run: TrainSettings = EAGLE_RUN,
    start: PublishedHead | None = None,
) -> dict[str, float]:
    """Train a head on a frozen target's answers and write it to `folder`.

    Several answers to one prompt share an id; features, where texts have them, are those of
    `fused_layers`. Checkpoint and metrics go into the `training` folder. `start` is a head to go on
    from, in any layout, by default the target's last layer; it keeps the tokens that it knows.

    Returns:
        Figures on the texts held back, see `acceptance`.

    Raises:
        UnsupportedError: if the target changes its logits after the head.
        OptionError: if nothing is left to train on or to evaluate with, or `start` is of another
            kind, or has other sizes than `settings`.
        AssistantError: if `start` belongs to another model.
    """
    check_plain_head(model)
    if start is not None:
        check_start(start, model, settings)
    learned, held = learned_and_held(texts, settings.held_back, "texts")
    torch.manual_seed(run.seed)
    begun = new_head(model, learned, settings, folder) if start is None else start
    head = build(begun, model)
    trained = dict(head.attention.named_parameters())
    for parameter in trained.values():
        parameter.requires_grad_(True)
    loss = StepsLoss(head, model, settings)
    lengths = [
        num_features(t.response) - cut_prompt(t.response, settings.max_context) for t in learned
    ]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        batches = [held[begin : begin + EVALUATED] for begin in range(0, len(held), EVALUATED)]
        return acceptance([match for batch in batches for match in loss.matches(batch)])

    # By name: the head goes to others, whom this machine's folders do not concern.
    started = None if start is None else Path(start.name).name
    facts = {**asdict(settings), "texts": len(texts), "start": started}
    known = {**facts, **learned_from(model, [text.response for text in texts])}
    figures = train(trained, loss, epochs, run, folder / "training", evaluate, known)
    if processes().is_main_process:
        # Beside what was trained there are the tokens that it knows.
        tensors = normal_names(begun.tensors)
        tensors |= {name: weight.detach().bfloat16() for name, weight in trained.items()}
        config, tensors = layout(head, tensors, model, settings.steps)
        told = {"training": {**facts, **asdict(run)}, "held_back": figures}
        card = _card(base_name(model), folder, figures)
        write_published(folder, {**config, "hf_spec": told}, tensors, card)
    return figures


def new_head(
    model: PreTrainedModel, texts: Sequence[Text], settings: EagleTrainSettings, folder: Path
) -> PublishedHead:
    """A head that begins as the target's last layer on the state of its high one.

    It can propose the most frequent tokens of the answers in `texts`.
    """
    vocabulary = answer_vocabulary(
        model, (text.response for text in texts), settings.vocabulary_size
    )
    config: Any = model.config.get_text_config()
    width, heads = config.hidden_size, config.num_attention_heads
    described = {
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
    tensors = {**_first_weights(model, described), "lm_head.weight": scores.weight.detach().clone()}
    if vocabulary is not None:
        tensors["d2t"] = vocabulary.cpu() - torch.arange(len(vocabulary))
    return PublishedHead("eagle3", described, tensors, folder, str(folder))


def layout(
    head: EagleHead, tensors: Mapping[str, Tensor], model: PreTrainedModel, steps: int
) -> Layout:
    """The files of a head, to draft `steps` tokens, with `tensors` by the names of its parts."""
    text = model.config.get_text_config()
    verifier = Verifier(base_name(model), (type(model).__name__,), text)
    return for_vllm(head.spec, tensors, verifier, steps)


def check_start(start: PublishedHead, model: PreTrainedModel, settings: EagleTrainSettings) -> None:
    """Refuse a head to go on from that training does not fit, or that is not what is asked for.

    Raises:
        OptionError: if it is of another kind, or has other sizes than `settings`.
        AssistantError: if it belongs to another model.
    """
    what = f"the head to go on from, {start.name!r},"
    if start.family != "eagle3":
        raise OptionError(f"{what} is of the family {start.family!r}, not 'eagle3'")
    tensors = normal_names(start.tensors)
    spec = read_spec(start, tensors, model.config.get_text_config())
    layers = fused_layers(model)[:-1]
    if spec.hidden_layers != layers:
        raise OptionError(f"{what} reads the layers {spec.hidden_layers}; training reads {layers}")
    full, asked = num_embeddings(model), settings.vocabulary_size
    known = min(len(tensors.get("lm_head.weight", ())) or full, full)
    # Answers may have had fewer tokens than the head was allowed.
    if asked not in (known, _allowed(start)) and (asked or full) != known:
        raise OptionError(
            f"{what} knows {known} of {full} tokens, which stay the same, and vocabulary_size is "
            f"{asked}: ask for {known if known < full else None}"
        )
    if settings.mlp_size not in (None, spec.inner_size):
        raise OptionError(
            f"{what} has an MLP of {spec.inner_size}, and mlp_size is {settings.mlp_size}"
        )


def _allowed(start: PublishedHead) -> object:
    """Of how many tokens a head was to know at most, if it was trained here."""
    told = start.config.get("hf_spec")
    training = told.get("training") if isinstance(told, dict) else None
    return training.get("vocabulary_size", ()) if isinstance(training, dict) else ()


class StepsLoss:
    """The loss on micro-batches, over several draft steps of a head, with a frozen target."""

    def __init__(self, head: EagleHead, target: PreTrainedModel, settings: EagleTrainSettings):
        self.head, self.target, self.settings = head, target, settings
        vocabulary = head.head.vocabulary
        self.teacher = FewTokensHead(target.get_output_embeddings(), vocabulary)
        self.layers = fused_layers(target)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """The cross-entropy with the target's distribution over the tokens that the head knows.

        It is summed over the learned places, the mean of the steps in it, and their number.
        """
        pairs = read_pairs(self.target, batch.items, 1, self.settings.max_context, self.layers)
        own = self.target.config.get_text_config().hidden_size
        # The state after the final norm is what the target's head reads.
        truth = pairs.features[pairs.rows, pairs.places + 1, -own:]
        with torch.no_grad(), self._autocast():
            opinion = self.teacher.draft_logits(truth.to(self.target.dtype)).float().softmax(dim=-1)
        weights = [self.settings.step_weight**step for step in range(self.settings.steps)]
        total = torch.zeros((), device=truth.device)
        for step, outputs in enumerate(self._steps(pairs)):
            # What precedes a text has no output that could stand in for its first features.
            known = pairs.places >= step
            with self._autocast():
                logits = self.head.head.draft_logits(
                    outputs[pairs.rows[known], pairs.places[known]]
                )
            distance = F.cross_entropy(logits.float(), opinion[known], reduction="sum")
            total = total + distance * (weights[step] / sum(weights))
        return total, len(truth)

    @torch.no_grad()
    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Per text (answer tokens, steps) bool: whether token j of a chain drafted there is right.

        Row n belongs to the draft whose first token is token n of the answer. Every step gets the
        text's own tokens, which are those of the draft as long as it is right. Tokens after the
        text count as wrong.
        """
        pairs = read_pairs(self.target, texts, 1, None, self.layers)
        answers = pairs.tokens[pairs.rows, pairs.places + 1]
        size = (len(texts), pairs.tokens.shape[1] + self.settings.steps, self.settings.steps)
        right = torch.zeros(size, dtype=torch.bool, device=answers.device)
        for step, outputs in enumerate(self._steps(pairs)):
            with self._autocast():
                logits = self.head.head.draft_logits(outputs[pairs.rows, pairs.places])
            hit = self.head.head.tokens(logits.argmax(dim=-1)) == answers
            # The draft whose token `step` this is began so many places before.
            known = pairs.places >= step
            right[pairs.rows[known], pairs.places[known] - step, step] = hit[known]
        return [right[row, first:stop].cpu() for row, (first, stop) in enumerate(pairs.span)]

    def _steps(self, pairs: Pairs) -> Iterator[Tensor]:
        """(B, T, h) outputs of each step of `draft_steps`."""
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
    """Run a head over whole texts, as its draft steps would from every place at once.

    In step s, place i is the s-th pair after the true ones 0 to i - s: its feature is what the step
    before gave one place earlier, and it sees the true pairs and, of each step between, the pair
    that leads to it.

    Args:
        head: which is run.
        tokens: (B, T) int64, t_{i+1}.
        features: (B, T, h) from `EagleHead.fuse`.
        num_steps: to run.

    Yields:
        (B, T, h), of each step what the head predicts.
    """
    places = torch.arange(tokens.shape[1], device=tokens.device)
    back = places[:, None] - places
    cache = DynamicCache()
    seen: list[Tensor] = []
    for step in range(num_steps):
        # Keys of step s lie in the cache after those of the steps before it.
        seen = [back >= step, *(back == step - earlier for earlier in range(1, step + 1))]
        mixed, _ = head.mix(tokens, features)
        outputs = head.attend(
            mixed,
            attention_mask=torch.cat(seen, dim=-1)[None, None],
            position_ids=places[None],
            **{CACHE_NAME: cache},
        )
        yield outputs
        features = torch.cat([features[:, :1], outputs[:, :-1].to(features.dtype)], dim=1)


def _first_weights(model: PreTrainedModel, layer: dict[str, Any]) -> dict[str, Tensor]:
    """The target's last layer where shapes agree; a feature begins as the high layer's state."""
    last: Any = last_layers(model, 1)
    known = {
        name.partition("layers.0.")[2]: weight.detach().float()
        for name, weight in last.named_parameters()
    }
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    queries, keys = (
        layer[name] * layer["head_dim"] for name in ("num_attention_heads", "num_key_value_heads")
    )
    tensors: dict[str, Tensor] = {}
    for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
        wide = torch.randn(rows, 2 * width) * DEVIATION
        weight = known.get(f"self_attn.{name}.weight")
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
        tensors[f"layers.0.{name}.weight"] = _first_rows(known.get(f"{name}.weight"), shape)
    ones = torch.ones(width, device=model.device, dtype=model.dtype)
    for name, norm in (
        ("layers.0.hidden_norm", getattr(last.layers[0], "input_layernorm", None)),
        ("layers.0.input_layernorm", None),
        (
            "layers.0.post_attention_layernorm",
            getattr(last.layers[0], "post_attention_layernorm", None),
        ),
        ("norm", getattr(last, "norm", None)),
    ):
        # What a norm makes of ones is its weight, however it is stored.
        tensors[f"{name}.weight"] = ones if norm is None else norm(ones).detach()
    return {**tensors, "fc.weight": torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)}


def _first_rows(weight: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """A matrix of `shape` cut out of `weight`, drawn at random where that is too small."""
    if weight is None or weight.shape[0] < shape[0] or weight.shape[1] < shape[1]:
        return torch.randn(shape) * DEVIATION
    return weight[: shape[0], : shape[1]].clone()


def _card(base: str, folder: Path, figures: Mapping[str, float]) -> str:
    """What the head is and how to use it, as a model card."""
    rows = "\n".join(f"| `{name}` | {value:.4f} |" for name, value in figures.items())
    return f"""---
{f"base_model: {base}" if is_hub_id(base) else "library_name: hf_spec"}
tags:
- speculative-decoding
- eagle3
---

{GENERATED}

# An EAGLE-3 head for {base}

Written by `hf-spec train eagle` in the layout of vLLM's speculators; `config.json` has the options.

```python
import hf_spec  # adds spec_strategy= and assistant= to generate()

model.generate(**inputs, spec_strategy="eagle", assistant={folder.name!r}, max_new_tokens=64)
```

## Held-back texts

| | |
|---|---|
{rows}
"""
