"""DISCO's classifier: will the target accept the token that a draft distribution is about to give?

Twelve features of the distribution and its place, a linear layer, ReLU, a linear layer (Mamou et
al. 2024, arXiv 2405.04304, section 3). The paper leaves the width, the activation, the scaling and
the kind of entropy open; here they are 32, ReLU, features standardised by the training set, and the
entropy of the whole distribution.
"""

from __future__ import annotations

from typing import Any

import hf_spec_kernels
import torch
from torch import Tensor, nn

from hf_spec.adapters.adapter import AdapterMethod, BaseModel, register_method
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.adapters.reading import check_tensors, whole_number
from hf_spec.common.errors import AssistantError
from hf_spec.methods.disco.settings import FEATURES, TOP

METHOD = "disco"
NUM_FEATURES = TOP + 2


def draft_features(draft_probs: Tensor, positions: Tensor) -> Tensor:
    """What the classifier sees of draft distributions, computed where they are.

    Args:
        draft_probs: (M, V) float32, after every processor. Vocabularies of fewer than ten tokens
            count as having tokens of probability 0.
        positions: (M,) where the drafted token stands, 0 for the first token of the generation.

    Returns:
        (M, 12) float32: the ten largest probabilities in descending order, the entropy in nats of
        the whole distribution, log(1 + position).
    """
    place = positions.to(draft_probs.dtype).log1p()[:, None]
    return torch.cat([hf_spec_kernels.draft_features(draft_probs, TOP), place], dim=-1)


class DiscoClassifier(nn.Module):
    """Features of a draft distribution -> logit of the probability that its token is accepted.

    There are `hidden_size` places between the two layers.

    Attributes:
        mean, std: (12,) float32, of the features in the training set.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, hidden_size: int = 32):
        super().__init__()
        self.hidden_size = hidden_size
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("std", torch.ones(NUM_FEATURES))
        self.inner = nn.Linear(NUM_FEATURES, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """(M, 12) float32 features as they are, not yet standardised -> (M,) acceptance logits."""
        return self.outer(self.inner((features - self.mean) / self.std).relu())[:, 0]

    def fit_scaler(self, features: Tensor) -> None:
        """Take mean and standard deviation from (M, 12) features."""
        self.mean.copy_(features.mean(dim=0))
        # A feature that never changes is left as it is.
        std = features.std(dim=0, correction=0)
        self.std.copy_(torch.where(std > 1e-6, std, torch.ones_like(std)))

    def to_adapter(self, base: BaseModel, **options: Any) -> SpecAdapter:
        """The classifier as an adapter for the target that is `base`.

        `options` go with it as JSON values: `threshold`, `max_draft_tokens`, `draft` (Hub id,
        folder relative to the adapter's, or {"truncated": layers}) and measured numbers.
        """
        options = {"hidden_size": self.hidden_size, **options}
        return SpecAdapter(METHOD, base, options, dict(self.state_dict()))

    @classmethod
    def from_adapter(cls, adapter: SpecAdapter) -> DiscoClassifier:
        """The classifier of an adapter, ready for use; an `AssistantError` if it makes none."""
        what, options = "the DISCO adapter", adapter.options
        hidden_size = whole_number(what, options, "hidden_size", 1, adapter.largest)
        # Adapters once said which groups of features they look at.
        if options.get("features", [*FEATURES]) != [*FEATURES]:
            raise AssistantError(
                f"{adapter.folder or 'the adapter'} looks at some features only "
                f"({options['features']!r}); train it again: hf-spec train disco"
            )
        classifier = cls(hidden_size)
        shapes = {name: tensor.shape for name, tensor in classifier.state_dict().items()}
        check_tensors(what, adapter.tensors, shapes)
        if not bool((adapter.tensors["std"] > 0).all()):
            raise AssistantError(f"{what} is damaged: a feature has no spread; train it again")
        classifier.load_state_dict(adapter.tensors)
        return classifier.eval().requires_grad_(False)


register_method(
    AdapterMethod(
        METHOD,
        strategy="disco",
        title="DISCO's stop classifier for {}",
        build=lambda adapter, target: DiscoClassifier.from_adapter(adapter),
    )
)
