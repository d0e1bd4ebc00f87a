"""Training of DISCO's classifier on the target's own answers (`hf-spec train disco`).

At every position of an answer the draft model predicts one token after the target's own text; the
token is accepted if it is the target's (Mamou et al. 2024, arXiv 2405.04304, appendix D.1). So the
data holds no draft that already went wrong. Two kinds of labels:

========  =====================================================================================
`hard`    1 where the draft model's first choice is the target's token, else 0
`soft`    1 - TV(draft, target): the probability that residual rejection accepts a sampled token
========  =====================================================================================

The paper leaves open the optimiser, the weights of the classes and how its labels go together with
the total variation distance it names; the choices here are in `DiscoTrainSettings`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_spec.adapters.folder import BaseModel, SpecAdapter
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.disco.classifier import METHOD, DiscoClassifier, draft_features
from hf_spec.methods.disco.drafter import find_draft_model
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.truncated import named_layers
from hf_spec.training.answers import answer_batches, answer_logits, stored
from hf_spec.training.held_out import split_by_seed
from hf_spec.training.job import ResultTable, TrainingJob, TrainingResult
from hf_spec.training.responses import Response
from hf_spec.training.run_record import record_start
from hf_spec.training.trainer import processes, save_trained

# How many distributions of a forward are spread out at once.
SPREAD_TOKENS = 128

STATIC_LENGTHS = tuple(range(1, 11))
CONFIDENCE_THRESHOLD = 0.4

# A draft model, what `assistant=` may name, or {"truncated": layers}.
Draft = PreTrainedModel | str | dict[str, int]


@dataclass(frozen=True)
class Observed:
    """The draft model's guess at each of the T tokens of the answer to a prompt.

    Attributes:
        features: (T, 12) float32, see `draft_features`.
        matched: (T,) bool, whether the most probable draft token is the target's.
        labels: (T,) float32, what the classifier learns.
    """

    id: str
    task: str
    features: Tensor
    matched: Tensor
    labels: Tensor


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train disco`."""
    draft, layers = job.options.draft, job.options.draft_layers
    if (draft is None) == (layers is None):
        raise OptionError("give either --draft or --draft-layers")
    named: Draft = draft if draft is not None else {"truncated": layers}
    answers, tasks = job.answers(), job.options.tasks or None
    adapter = train_disco(job.target, named, answers, job.out, job.settings, tasks)
    # Figures of the classifier and of fixed rules on the held-out prompts.
    validation = adapter.options["validation"]
    keys = ("precision", "recall", "f1")
    rows = [
        (rule, name, *(f"{figures[key]:.2f}" for key in keys))
        for rule, classes in validation["rules"].items()
        for name, figures in classes.items()
    ]
    title = f"{validation['acceptance']:.0%} of the held-out positions are accepted"
    columns = ("rule", "class", "precision", "recall", "F1")
    return TrainingResult(validation, ResultTable(title, columns, rows))


def train_disco(
    model: PreTrainedModel,
    draft: Draft,
    responses: Sequence[Response],
    folder: Path,
    settings: DiscoTrainSettings,
    tasks: Sequence[str] | None = None,
) -> SpecAdapter:
    """Train a classifier for a target and a draft model, and write its adapter to `folder`.

    It learns from greedy answers of the target, those of some `tasks` alone if these are given. The
    name of a draft model is written into the adapter, that of a folder as seen from `folder`,
    beside or inside of which it must lie. What was observed is kept in `folder / "training"`; a run
    that was interrupted goes on there.

    Raises:
        OptionError: if too few answers are left, or `folder` holds those of another run.
        AssistantError: if the draft model cannot be loaded.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draft_model, named = _named_draft(draft, folder, model)
    chosen = [r for r in responses if r.response and (tasks is None or r.task in tasks)]
    ids = [response.id for response in chosen]
    learned_ids, held_ids = split_by_seed(ids, settings.validation_share, settings.seed)
    (folder / "training").mkdir(exist_ok=True)
    # Training takes seconds, so all processes do it; what takes long is computed once.
    with processes().main_process_first():
        if processes().is_main_process:
            record_start(folder / "training", asdict(settings), 0, model.device)
        observed = observe(model, draft_model, chosen, folder / "training", settings.labels)
    learned = [o for o in observed if o.id in learned_ids]
    held = [o for o in observed if o.id in held_ids]
    classifier, history = fit(learned, held, settings)
    adapter = classifier.to_adapter(
        BaseModel.of(model),
        draft=named,
        threshold=settings.threshold,
        max_draft_tokens=settings.max_draft_tokens,
        training={
            **asdict(settings),
            "tasks": sorted({r.task for r in chosen}),
            "prompts": len(learned_ids),
            "positions": sum(len(o.labels) for o in learned),
            "validation_loss": history,
        },
        validation_prompts=sorted(held_ids),
        validation=evaluate(classifier, held, settings.threshold),
    )
    return save_trained(folder, adapter)


def observe(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    responses: Sequence[Response],
    folder: Path,
    labels: str,
) -> list[Observed]:
    """What the draft model would have proposed at every position of `responses`.

    The target runs only for the `labels` "soft". What `folder` holds already is read.

    Raises:
        OptionError: if `folder` holds what was made of other models, labels or responses.
    """
    facts = {"draft": _digest(draft), "target": _digest(model), "labels": labels}
    compute = partial(_guesses, model, draft, labels)
    return [
        Observed(response.id, response.task, **found)
        for response, found in stored(folder, "observed", responses, facts, compute)
    ]


def fit(
    learned: Sequence[Observed], held: Sequence[Observed], settings: DiscoTrainSettings
) -> tuple[DiscoClassifier, list[float]]:
    """Train until the loss on `held` rises; the best epoch, and that loss after every epoch."""
    features, labels = _together(learned)
    held_features, held_labels = _together(held)
    accepted = float(labels.sum())
    balance = (len(labels) - accepted) / max(accepted, 1.0)
    weight = torch.tensor(max(balance, 1e-3) if settings.class_weights else 1.0)
    loss_of = partial(F.binary_cross_entropy_with_logits, pos_weight=weight)
    generator = torch.Generator().manual_seed(settings.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        classifier = DiscoClassifier(settings.hidden_size)
    classifier.fit_scaler(features)
    optimizer = torch.optim.AdamW(
        classifier.parameters(), settings.learning_rate, weight_decay=settings.weight_decay
    )
    best, history = copy.deepcopy(classifier.state_dict()), []
    for _ in tqdm(range(settings.max_epochs), desc="epochs", disable=None):
        for batch in torch.randperm(len(labels), generator=generator).split(settings.batch_size):
            loss = loss_of(classifier(features[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            history.append(float(loss_of(classifier(held_features), held_labels)))
        if history[-1] == min(history):
            best = copy.deepcopy(classifier.state_dict())
        elif len(history) - history.index(min(history)) > settings.patience:
            break
    classifier.load_state_dict(best)
    return classifier.eval(), history


@torch.no_grad()
def evaluate(
    classifier: DiscoClassifier, observed: Sequence[Observed], threshold: float
) -> dict[str, Any]:
    """Precision, recall and F1 of rules that predict acceptance, on the same positions.

    An answer falls into the rounds of an ideal drafter, which drafts up to and including its first
    mismatch: every position belongs to one round, and is the j-th draft token of it. There the
    static length k predicts "accepted" for j = 0 .. k - 1 and "rejected" from j = k on; the
    confidence rule "accepted" where the largest draft probability is at least 0.4; the classifier
    where it gives acceptance at least `threshold`. What came true is the match with the target.

    Returns:
        Rule ("disco", "confidence", "static 1", ...) -> class ("accepted", "rejected") -> figures;
        and the share of accepted positions.
    """
    features, _ = _together(observed)
    matched = torch.cat([o.matched for o in observed])
    places = torch.cat([round_places(o.matched) for o in observed])
    predicted = {
        "disco": classifier(features).sigmoid() >= threshold,
        "confidence": features[:, 0] >= CONFIDENCE_THRESHOLD,
        **{f"static {length}": places < length for length in STATIC_LENGTHS},
    }
    rules = {
        name: {"accepted": _figures(said, matched), "rejected": _figures(~said, ~matched)}
        for name, said in predicted.items()
    }
    return {"acceptance": float(matched.float().mean()), "rules": rules}


def round_places(matched: Tensor) -> Tensor:
    """(T,) int64: which draft token of its ideal round a position is, 0 after every mismatch."""
    places, place = [], 0
    for match in matched.tolist():
        places.append(place)
        place = place + 1 if match else 0
    return torch.tensor(places, dtype=torch.long)


def _figures(predicted: Tensor, came_true: Tensor) -> dict[str, float]:
    right = int((predicted & came_true).sum())
    said, true = int(predicted.sum()), int(came_true.sum())
    return {
        "precision": right / said if said else 0.0,
        "recall": right / true if true else 0.0,
        "f1": 2 * right / (said + true) if said + true else 0.0,
    }


def _together(observed: Sequence[Observed]) -> tuple[Tensor, Tensor]:
    return torch.cat([o.features for o in observed]), torch.cat([o.labels for o in observed])


def _guesses(
    model: PreTrainedModel, draft: PreTrainedModel, labels: str, shard: Sequence[Response]
) -> dict[str, Tensor]:
    parts: dict[str, list[Tensor]] = defaultdict(list)
    for batch in answer_batches(shard):
        draft_logits = answer_logits(draft, batch, num_embeddings(model))
        target_logits = answer_logits(model, batch) if labels == "soft" else draft_logits
        chosen = torch.tensor([token for one in batch for token in one.response])
        places = torch.tensor([place for one in batch for place in range(len(one.response))])
        columns = (draft_logits, target_logits, chosen, places)
        spread = (column.split(SPREAD_TOKENS) for column in columns)
        for drafted, wanted, tokens, at in zip(*spread, strict=True):
            probs = drafted.float().softmax(dim=-1)
            matched = probs.argmax(dim=-1) == tokens.to(probs.device)
            label = matched.float()
            if labels == "soft":
                target = wanted.to(probs.device).float().softmax(dim=-1)
                # 1 - TV is the mass that both distributions share.
                label = torch.minimum(probs, target).sum(dim=-1)
            parts["features"].append(draft_features(probs, at.to(probs.device)).cpu())
            parts["matched"].append(matched.cpu())
            parts["labels"].append(label.cpu())
    return {name: torch.cat(tensors) for name, tensors in parts.items()}


def _named_draft(
    draft: Draft, folder: Path, target: PreTrainedModel
) -> tuple[PreTrainedModel, str | dict[str, int] | None]:
    """The draft model, and what the adapter says of it."""
    if isinstance(draft, PreTrainedModel):
        return resolve_draft_model(METHOD, draft, target), None
    named: str | dict[str, int] = draft
    if (count := named_layers(draft)) is not None:
        named = {"truncated": count}
    elif isinstance(draft, str) and Path(draft).is_dir():
        named = os.path.relpath(draft, folder)
    unfinished = SpecAdapter(METHOD, BaseModel.of(target), {"draft": named}, {}, folder)
    return find_draft_model(unfinished, target), named


def _digest(model: PreTrainedModel) -> str:
    """A few weights of every parameter; tells models apart that share most of them."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        some = flat[:: max(1, len(flat) // 8)].float().tolist()
        digest.update(json.dumps([name, some]).encode())
    return digest.hexdigest()
