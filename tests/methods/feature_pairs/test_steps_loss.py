"""Loss over several draft steps, with an MTP module; tests of EAGLE heads cover it, too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.methods.feature_pairs.steps_loss import StepsLoss, draft_steps
from hf_spec.methods.mtp.head import MtpHead, build_from
from hf_spec.methods.mtp.settings import MtpTrainSettings
from hf_spec.methods.mtp.training import layout, named_weights, new_module
from hf_spec.training.features import LAST, Text, stored_texts
from hf_spec.training.responses import Response
from hf_spec.training.trainer import MicroBatch
from tests import head_training as checks
from tests.mtp_reference import NAMES, Reference, Sample

SETTINGS = MtpTrainSettings(steps=3)


@pytest.fixture
def texts(model: PreTrainedModel, responses: list[Response], tmp_path: Path) -> list[Text]:
    return stored_texts(model, responses, tmp_path / "features", LAST)


@pytest.fixture
def head(model: PreTrainedModel) -> MtpHead:
    """Return a module with large random weights."""
    torch.manual_seed(0)
    tensors = {name: t + torch.randn(t.shape) * 0.2 for name, t in new_module(model).items()}
    return build_from("a module", tensors, model)


def reference(model: PreTrainedModel, head: MtpHead) -> Reference:
    """Return the module in plain torch."""
    _, stored = layout(head, dict(named_weights(head)), model, 3)
    prefix, names, _ = NAMES["speculators"]
    short = {name.removeprefix(prefix): weight.detach() for name, weight in stored.items()}
    parts = {name: short.pop(f"{name}.weight") for name in names}
    return Reference(Sample("speculators", model, parts, short, stored))


def test_the_loss_is_that_of_every_draft_step(
    model: PreTrainedModel, texts: list[Text], head: MtpHead
) -> None:
    """Step s predicts a token with a draft begun s tokens earlier; later steps have less weight."""
    plain, expected, count = reference(model, head), 0.0, 0
    weights = [1.0, 0.6, 0.36]
    for text in texts[:2]:
        response = text.response
        tokens = [*response.prompt, *response.response]
        _, probs = checks.states_and_probs(model, tokens, None)
        for position in range(len(response.prompt) - 2, len(tokens) - 2):
            count += 1
            for step in range(min(3, position + 1)):
                root = position - step + 2
                logits = plain.logits(tokens[:root], tokens[root : position + 2])
                entropy = checks.entropy(probs[position + 1], logits)
                expected += entropy * weights[step] / sum(weights)
    settings = replace(SETTINGS, max_context=None)
    with torch.no_grad():
        loss, number = StepsLoss(head, model, settings)(MicroBatch(checks.computed(texts[:2])))
    assert number == count
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_drafts_do_not_depend_on_later_tokens(model: PreTrainedModel, head: MtpHead) -> None:
    """Gradients of step s reach only the features up to s positions before the output."""
    tokens = torch.randint(3, 60, (1, 7), generator=torch.Generator().manual_seed(1))
    features = torch.randn(1, 7, head.hidden_size, requires_grad=True)
    for step, outputs in enumerate(draft_steps(head, tokens, features, 3)):
        for position in range(step, 7):
            [slope] = torch.autograd.grad(
                outputs[0, position].square().sum(), features, retain_graph=True
            )
            reached = slope[0].abs().sum(-1) > 0
            assert reached.tolist() == [index <= position - step for index in range(7)]
