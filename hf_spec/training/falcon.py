"""Training of a Falcon head on the target's own answers (`hf-spec train falcon`).

The head starts from the target's last layers and a plain sum of its two inputs, and learns by
coupled sequential glancing distillation (`hf_spec.training.csgd`). Loss on answers only. The grid
of blocks is drawn anew for every micro-batch, since a generation brings every alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from accelerate import PartialState
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.errors import OptionError
from hf_spec.models.draft_head import check_plain_head
from hf_spec.models.falcon_head import FalconHead, FalconShape
from hf_spec.training.csgd import CsgdSettings, GlancingLoss, read_pairs
from hf_spec.training.features import Text, num_features, text_features
from hf_spec.training.figures import by_slot
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.split import learned_and_held
from hf_spec.training.trainer import TrainSettings, micro_batches, train

# Texts whose features tell how large those of the target are.
SAMPLE = 32
# Texts of one forward when the held-back ones are evaluated.
EVALUATED = 8


@dataclass(frozen=True)
class FalconTrainSettings:
    """What is trained.

    Attributes:
        shape: of the head.
        csgd: what it is taught.
        vocabulary_size: most frequent tokens that it can propose; None for all.
        max_context: prompts are cut to so many last tokens in training; None leaves them whole.
        max_depth: tokens that one draft may have, written into the adapter.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
    """

    shape: FalconShape = field(default_factory=FalconShape)
    csgd: CsgdSettings = field(default_factory=CsgdSettings)
    vocabulary_size: int | None = 8192
    max_context: int | None = 64
    max_depth: int = 8
    held_back: float = 0.03


def train_falcon(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: FalconTrainSettings,
    run: TrainSettings,
    start: SpecAdapter | None = None,
) -> SpecAdapter:
    """Train a head and write its adapter to `folder`.

    Args:
        model: the target; frozen.
        texts: its answers with its features; several answers to one prompt share an id.
        folder: receives the adapter; checkpoint and metrics go into its `training` folder.
        settings: what is trained.
        run: how.
        start: a head to go on from, by default the target's last layers. Its vocabulary, which is
            not learned, is drawn anew.

    Raises:
        UnsupportedError: if the target changes its logits behind the head.
        OptionError: if nothing is left to train on or to evaluate with, or `start` has another
            shape.
        AssistantError: if `start` belongs to another model.
    """
    check_plain_head(model)
    learned, held = learned_and_held(texts, settings.held_back, "texts")
    torch.manual_seed(run.seed)
    sizes = hidden_sizes(model, learned[:SAMPLE])
    head = _new_head(model, learned, settings, sizes, start)
    parameters = head.trained()
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    loss = GlancingLoss(head, model, settings.csgd, run.epochs, sizes, settings.max_context)
    lengths = [_trained_length(text, settings.max_context) for text in learned]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        head.eval()
        matches = [
            match
            for begin in range(0, len(held), EVALUATED)
            for match in first_choices(head, model, held[begin : begin + EVALUATED])
        ]
        head.train()
        return acceptance(matches)

    # By name: the adapter goes to others, whom this machine's folders do not concern.
    started = start.folder.name if start is not None and start.folder is not None else None
    facts = {**asdict(settings), "texts": len(texts), "start": started}
    head.train()
    figures = train(parameters, loss, epochs, run, folder / "training", evaluate, facts)
    options = {
        "max_depth": settings.max_depth,
        "training": {**facts, **asdict(run)},
        "held_back": figures,
    }
    adapter = head.to_adapter(options)
    if PartialState().is_main_process:
        save_with_card(folder, adapter)
    return adapter


def _new_head(
    model: PreTrainedModel,
    learned: Sequence[Text],
    settings: FalconTrainSettings,
    sizes: Tensor,
    start: SpecAdapter | None,
) -> FalconHead:
    responses = (text.response for text in learned)
    vocabulary = answer_vocabulary(model, responses, settings.vocabulary_size)
    if start is not None:
        head = FalconHead.from_adapter(start, model, vocabulary)
        if head.shape != settings.shape:
            raise OptionError(
                f"the head to start from has the shape {asdict(head.shape)}, not "
                f"{asdict(settings.shape)}"
            )
        for parameter in head.trained().values():
            parameter.requires_grad_(True)
        return head
    head = FalconHead(model, settings.shape, vocabulary)
    depth = model.config.get_text_config().num_hidden_layers
    entering = hidden_sizes(model, learned[:SAMPLE], depth - settings.shape.num_layers)
    head.start_plain(sizes, float(entering.square().mean().sqrt()))
    return head


def hidden_sizes(model: PreTrainedModel, texts: Sequence[Text], layer: int = -1) -> Tensor:
    """(H,) float32, the root mean square of each dimension of a hidden state of `texts`."""
    states = text_features(model, [text.response for text in texts], layer)
    return torch.cat([state.float() for state in states]).square().mean(dim=0).sqrt()


def _trained_length(text: Text, max_context: int | None) -> int:
    cut = 0 if max_context is None else max(0, len(text.response.prompt) - max_context)
    return num_features(text.response) - cut


@torch.no_grad()
def first_choices(head: FalconHead, model: PreTrainedModel, texts: Sequence[Text]) -> list[Tensor]:
    """Per text (answer tokens, k) bool: whether slot j of the block drafted there was right.

    Row n belongs to the draft whose first token is token n of the answer, its slot j to the token j
    places on. Slots behind the text count as wrong. Every place ends a block of one of the k grids,
    so k forwards under the target's own features and tokens tell all of it exactly.
    """
    k = head.shape.block_size
    pairs = read_pairs(model, texts, k)
    length = pairs.tokens.shape[1]
    right = torch.zeros(len(texts), length + 1, k, dtype=torch.bool, device=model.device)
    place_of = head.head.places().to(model.device)
    answers = place_of[pairs.tokens[pairs.rows, pairs.places + k]]
    for grid in range(k):
        with torch.autocast(model.device.type, torch.bfloat16):
            foretold = head(pairs.tokens, pairs.features, grid)[pairs.rows, pairs.places]
            choice = head.head.known(foretold).argmax(dim=-1)
        slot = (pairs.places - grid) % k
        # Pair i in slot j belongs to the block that ends k - 1 - j pairs on.
        last = (pairs.places + k - 1 - slot).clamp_max(length)
        right[pairs.rows, last, slot] = choice == answers
    found = []
    for row, (first, stop) in enumerate(pairs.span):
        found.append(right[row, first + k - 1 : stop + k - 1].cpu())
    return found


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Acceptance by slot, and tau of chains drafted in one pass.

    Args:
        matches: per text (answer tokens, k) bool, as `first_choices` gives them.

    Returns:
        "slot_j", the share of drafts whose token j is right; "slot_j_given", among those whose
        tokens before it are; "tau", accepted tokens a round of greedy chains of k.
    """
    figures = by_slot([row for match in matches for row in match.tolist()])
    rounds = accepted = 0
    for match in matches:
        lengths = match.long().cumprod(dim=1).sum(dim=1).tolist()
        place = 0
        while place < len(lengths):
            rounds, accepted = rounds + 1, accepted + lengths[place]
            place += lengths[place] + 1
    figures["tau"] = accepted / max(rounds, 1)
    return figures
