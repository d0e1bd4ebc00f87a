"""DISCO's classifier: 12 features of a draft distribution -> probability of acceptance.

See Mamou et al. 2024, arXiv 2405.04304, section 3, and `hf_spec.methods.disco`.
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
    """Return (M, 12) float32 features of (M, V) float32 distributions after all logits processors.

    They are the ten largest probabilities in descending order (padded with 0 in a vocabulary of
    fewer tokens), the entropy of the whole distribution in nats, and log(1 + position), where the
    first generated token has position 0.
    """
    log_position = positions.to(draft_probs.dtype).log1p()[:, None]
    return torch.cat([hf_spec_kernels.draft_features(draft_probs, TOP), log_position], dim=-1)


class DiscoClassifier(nn.Module):
    """Two-layer network: features -> acceptance logit."""

    # (12,) float32 statistics of the features in the training set.
    mean: Tensor
    std: Tensor

    def __init__(self, hidden_size: int = 32):
        super().__init__()
        self.register_buffer("mean", torch.zeros(NUM_FEATURES))
        self.register_buffer("std", torch.ones(NUM_FEATURES))
        self.inner = nn.Linear(NUM_FEATURES, hidden_size)
        self.outer = nn.Linear(hidden_size, 1)

    def forward(self, features: Tensor) -> Tensor:
        """Return (M,) acceptance logits of (M, 12) float32 features, not standardized."""
        return self.outer(self.inner((features - self.mean) / self.std).relu())[:, 0]

    def fit_scaler(self, features: Tensor) -> None:
        """Set mean and standard deviation to those of (M, 12) features."""
        self.mean.copy_(features.mean(dim=0))
        # Do not scale a constant feature.
        std = features.std(dim=0, correction=0)
        self.std.copy_(torch.where(std > 1e-6, std, torch.ones_like(std)))

    def to_adapter(self, base: BaseModel, **options: Any) -> SpecAdapter:
        """Return the classifier as an adapter for the target `base`.

        `options` are JSON values to store: `threshold`, `max_draft_tokens`, `draft` (Hub id, folder
        relative to the adapter's, or {"truncated": layers}) and measurements.
        """
        options = {"hidden_size": self.inner.out_features, **options}
        return SpecAdapter(METHOD, base, options, dict(self.state_dict()))

    @classmethod
    def from_adapter(cls, adapter: SpecAdapter) -> DiscoClassifier:
        """Return the classifier of an adapter; raise `AssistantError` if it is invalid."""
        what, options = "the DISCO adapter", adapter.options
        hidden_size = whole_number(what, options, "hidden_size", 1, adapter.largest)
        # An old adapter format allowed a subset of the features.
        if options.get("features", [*FEATURES]) != [*FEATURES]:
            raise AssistantError(
                f"{adapter.folder or 'the adapter'} uses only some features "
                f"({options['features']!r}); train it again: hf-spec train disco"
            )
        classifier = cls(hidden_size)
        shapes = {name: tensor.shape for name, tensor in classifier.state_dict().items()}
        check_tensors(what, adapter.tensors, shapes)
        if not bool((adapter.tensors["std"] > 0).all()):
            raise AssistantError(
                f"{what} is damaged: a feature has standard deviation 0; train it again"
            )
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
