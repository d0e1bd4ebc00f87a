"""Training of an EAGLE-3 head on the target's own answers (`hf-spec train eagle`).

The head learns the target's next-token distribution from hidden states of a low, a middle and a
high layer; features are not a training goal. From the second draft step on, its own output replaces
the feature that only the target could compute. `hf_spec.methods.feature_pairs.steps_loss` unrolls
several such steps ("training-time test", Li et al. 2025, arXiv 2503.01840, section 3.2).

Ours: the head starts as the target's last layer. Heads are saved in the layout of vLLM's
speculators, which other engines load too, and are read back like any published head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import base_name
from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.truncated import last_layers
from hf_spec.methods.eagle.head import STRATEGY, EagleHead, build
from hf_spec.methods.eagle.layouts import Layout, Verifier, for_vllm
from hf_spec.methods.eagle.settings import EAGLE_RUN, EagleTrainSettings
from hf_spec.methods.eagle.spec import canonical_names, read_spec
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.feature_pairs.steps_loss import StepsLoss
from hf_spec.methods.feature_pairs.teacher import output_rows
from hf_spec.methods.loading import resolve_published
from hf_spec.training.features import LAST, Text, fused_layers
from hf_spec.training.heads import (
    INIT_STD,
    CardText,
    HeadRun,
    as_stored,
    check_family,
    layer_config,
    run_head_training,
)
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.rollouts import OnlineTraining
from hf_spec.training.settings import TrainSettings

CARD = CardText("An EAGLE-3 head", "eagle", "vLLM's speculators", "eagle3", "eagle")


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train eagle`."""
    return run_head_training(job, fused_layers(job.target), train_eagle, check_start)


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
    training = HeadRun(model, texts, settings, run, start)
    torch.manual_seed(run.seed)
    initial = new_head(model, training.learned, settings, folder) if start is None else start
    head = build(initial, model)
    trained = dict(head.attention.named_parameters())
    metrics = training.train(trained, StepsLoss(head, model, settings), folder)
    # Initial tensors include the draft vocabulary, which is not trained.
    tensors = {**canonical_names(initial.tensors), **as_stored(trained)}
    training.write(folder, *layout(head, tensors, model, settings.steps), CARD)
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
    head_config = {
        **layer_config(model, settings.mlp_size, 1),
        "eagle_aux_hidden_state_layer_ids": list(fused_layers(model)[:-1]),
    }
    tensors = _initial_weights(model, head_config)
    tensors["lm_head.weight"] = output_rows(model, vocabulary)
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
    check_family(start, ("eagle3",))
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
