"""Training of an MTP module on the target's own answers (`hf-spec train mtp`).

The first module drafts several tokens by reading its own output, so training unrolls several draft
steps with falling weights, as in FastMTP (Cai et al. 2025, arXiv 2509.18362). The loss is that of
`hf_spec.methods.feature_pairs.steps_loss`. It covers the whole vocabulary, because MTP modules
share the target's embedding and output head, which stay frozen.

A new module is the target's last layer, reading the last hidden state. It is stored in the layout
of speculators; a module of the target's files that is fine-tuned keeps the layout of its family.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead, known_head
from hf_spec.common.errors import UnsupportedError
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.feature_pairs.steps_loss import StepsLoss
from hf_spec.methods.mtp.head import (
    FAMILY,
    LAYER,
    PARTS,
    SPECULATORS,
    Layout,
    MtpHead,
    build,
    build_from,
    head_of_target_files,
)
from hf_spec.methods.mtp.settings import MTP_RUN, MtpTrainSettings
from hf_spec.training.features import LAST, Text
from hf_spec.training.heads import (
    INIT_STD,
    CardText,
    HeadRun,
    as_stored,
    check_family,
    speculators_config,
)
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.settings import TrainSettings

CARD = CardText("An MTP module", "mtp", "vLLM's speculators", "mtp", "mtp")


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train mtp`."""
    name = job.options.init
    start: PublishedHead | MtpHead | None = None
    if name is not None:
        is_target = name == job.target.name_or_path
        start = head_of_target_files(job.target) if is_target else known_head(name)
    # Raises errors before the features are computed, which takes long.
    _module(job.target, start)
    texts = job.texts(LAST)
    return TrainingResult(train_mtp(job.target, texts, job.out, job.settings, job.run, start))


def train_mtp(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: MtpTrainSettings,
    run: TrainSettings = MTP_RUN,
    start: PublishedHead | MtpHead | None = None,
) -> dict[str, float]:
    """Train an MTP module on a frozen target's answers and write it to `folder`.

    See `hf_spec.methods.eagle.training.train_eagle`; stored features must be the last hidden
    states. `start` is a published module, or that of the target's own files.

    Raises:
        UnsupportedError: if the target changes its logits after the head, has no layers of the
            usual form, or has experts.
        OptionError: if the training or the held-out set is empty, or `start` is another kind.
        AssistantError: if `start` belongs to another model.
    """
    check_plain_head(model)
    published = start if isinstance(start, PublishedHead) else None
    training = HeadRun(model, texts, settings, run, published)
    if isinstance(start, MtpHead):
        training.record["start"] = "the target's own module"
    torch.manual_seed(run.seed)
    head = _module(model, start)
    trained = named_weights(head)
    metrics = training.train(trained, StepsLoss(head, model, settings), folder)
    training.write(folder, *layout(head, as_stored(trained), model, settings.steps), CARD)
    return metrics


def _module(model: PreTrainedModel, start: PublishedHead | MtpHead | None) -> MtpHead:
    """Return the module to train."""
    if start is None:
        head = build_from("a new MTP module", new_module(model), model)
    elif isinstance(start, MtpHead):
        # A copy: another training may start from it, too.
        head = build_from("the target's own MTP module", layout_tensors(start, model), model)
    else:
        check_family(start, (FAMILY,))
        head = build(start, model)
    if any(weight.ndim > 2 for weight in head.attention.parameters()):
        raise UnsupportedError(
            f"{type(model).__name__} has a layer with experts, and MTP modules of such layers "
            "cannot be trained; use `hf-spec train eagle`"
        )
    return head


def new_module(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the tensors of an untrained module in the layout of speculators.

    The projection passes the normed hidden state on to a copy of the last layer with full
    attention; the embedding's half is random.
    """
    decoder: Any = model.get_decoder()
    if not (hasattr(decoder, "layers") and hasattr(decoder, "norm")):
        raise UnsupportedError(
            f"{type(decoder).__name__} has no attributes `layers` and `norm`, which MTP modules "
            "need; use `hf-spec train eagle`"
        )
    kinds = getattr(decoder.config, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    full = [index for index, kind in enumerate(kinds) if kind == "full_attention"]
    layer = decoder.layers[full[-1] if full else -1]
    size = model.config.get_text_config().hidden_size
    neutral = _neutral_weight(decoder.norm)
    tensors = {f"{LAYER}{name}": weight for name, weight in layer.named_parameters()}
    tensors |= {f"{part}.weight": neutral for part in PARTS if part != "projection"}
    tensors["norm.weight"] = decoder.norm.weight
    embedding = torch.randn(size, size) * INIT_STD
    tensors["projection.weight"] = torch.cat([embedding, torch.eye(size)], dim=1)
    tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    return _stored(SPECULATORS, tensors, model)


def _neutral_weight(norm: nn.Module) -> Tensor:
    """Return the weight of a norm that only divides by the root mean square."""
    zero: Any = copy.deepcopy(norm)
    zero.weight.data.zero_()
    # Some classes store weights as offsets from one.
    return (1 - zero(torch.ones_like(zero.weight)).detach()).round()


def named_weights(head: MtpHead) -> dict[str, nn.Parameter]:
    """Return the trained weights under canonical names; the target's are not among them."""
    layer = head.attention.layers[0]
    weights = {f"{LAYER}{name}": weight for name, weight in layer.named_parameters()}
    weights |= dict(head.joined.named_parameters())
    weights["norm.weight"] = head.output_norm.weight
    return weights


def layout(
    head: MtpHead, tensors: dict[str, Tensor], model: PreTrainedModel, steps: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config and tensors of a module, set to draft `steps` tokens.

    `tensors` have canonical names; they are stored in the layout of speculators, or, if its network
    differs, in that of the module's family.
    """
    text = model.config.get_text_config().to_diff_dict()
    layers = {
        **text,
        "num_hidden_layers": 1,
        "model_type": model.config.get_text_config().model_type,
    }
    config = {
        "architectures": ["MTPDraftModel"],
        **speculators_config(FAMILY, model, steps),
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layers,
    }
    return config, _stored(head.layout, tensors, model)


def layout_tensors(head: MtpHead, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return a copy of the tensors of a module as they are stored."""
    tensors = {name: weight.detach().clone() for name, weight in named_weights(head).items()}
    return _stored(head.layout, tensors, model)


def _stored(kind: Layout, tensors: dict[str, Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
    """Return tensors with canonical names under those of a layout."""
    kind = SPECULATORS if kind.switches == SPECULATORS.switches else kind
    prefix = kind.example.format(model.config.get_text_config().num_hidden_layers)
    parts = dict(zip(PARTS, kind.parts, strict=True))
    stored = {}
    for name, tensor in tensors.items():
        if name.startswith(LAYER):
            stored[prefix + kind.layer + name.removeprefix(LAYER)] = tensor
        else:
            stored[f"{prefix}{parts[name.removesuffix('.weight')]}.weight"] = tensor
    return stored
