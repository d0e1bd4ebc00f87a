"""Cost model for one method, and the choice of the configs that use it.

`AdaptiveLengthDrafter` is `CostModelDrafter` with the verifier, the counters, and the length policy
of the method. It is used where a config leaves sizes open and the target's times can be measured.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_spec.backend.device.distributed_checks import tensor_parallel_size
from hf_spec.common.errors import UnsupportedError
from hf_spec.drafting.config import PolicyConfig
from hf_spec.drafting.cost_model.cost_model_drafter import Bounds, CostModelDrafter
from hf_spec.drafting.cost_model.draft_source import NODES_PER_LEVEL, DraftSource
from hf_spec.drafting.cost_model.selection import PlannedRound
from hf_spec.drafting.length_policy import MEASURED, MeasuredPolicy, make_policy
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.verifiers import Verifier

ConfigT = TypeVar("ConfigT", bound=PolicyConfig)


class AdaptiveLengthDrafter(CostModelDrafter):
    """A single method under the cost model: one drafter with a model, or several without.

    With a length policy other than `MeasuredPolicy`, it drafts in every round what the policy
    allows, and the cost model only chooses the nodes to send. Policy and verifier are those of the
    first of `sources`.
    """

    def __init__(
        self,
        sources: Sequence[DraftSource],
        target: PreTrainedModel,
        key: Hashable,
        bounds: Bounds,
    ):
        has_cost = sources[0].drafter.num_forwards(1) > 0
        free, assistants = ([], sources) if has_cost else (sources, [])
        super().__init__(free, assistants, target, (sources[0].name, key), bounds)
        self._main = sources[0]
        self._drafts_always = not isinstance(sources[0].policy, MeasuredPolicy | None)

    @property
    def method(self) -> Drafter:
        """The drafter of the method."""
        return self._main.drafter

    @property
    def counters(self) -> Mapping[str, int]:  # type: ignore[override]
        """Counters of the drafter and of the cost model."""
        return {**self._main.drafter.counters, **self._counts}

    @property
    def samples(self) -> bool:  # type: ignore[override]
        """True if the drafter samples its drafts."""
        return self._main.drafter.samples

    @property
    def graphs(self) -> Mapping[int, Any]:
        """Row -> graph of the last draft, for drafters that grow level by level."""
        return getattr(self._main.drafter, "graphs", {})

    def make_verifier(self, processors: Sequence[Any], num_rows: int) -> Verifier:
        """Return the drafter's verifier."""
        return self._main.drafter.make_verifier(processors, num_rows)

    def _draft_depths(
        self, source: DraftSource, plan: PlannedRound, max_depths: Mapping[int, int]
    ) -> dict[int, int]:
        """Return all levels for a policy that does not ask the cost model."""
        if self._drafts_always:
            return dict(max_depths)
        return super()._draft_depths(source, plan, max_depths)


def adapt_length(
    drafter: Drafter, target: PreTrainedModel, config: PolicyConfig, nodes_per_level: int
) -> AdaptiveLengthDrafter:
    """Return `drafter` under the cost model; for `nodes_per_level` see `DraftSource`."""
    depth = drafter.max_depth
    source = DraftSource(config.strategy, drafter, depth, nodes_per_level=nodes_per_level)
    max_nodes = getattr(config, "max_nodes", None) or depth
    if source.policy is not None:
        # A policy may exceed the length that it starts with.
        source.depth = max(depth, source.policy.longest)
    bounds = Bounds(source.depth, max_nodes)
    return AdaptiveLengthDrafter([source], target, config.batching, bounds)


def can_measure(target: PreTrainedModel) -> bool:
    """Return False for a tensor parallel model, whose processes must all take the same steps."""
    return tensor_parallel_size(target) == 1


def selects_nodes_by_cost(config: PolicyConfig, target: PreTrainedModel) -> bool:
    """Return True if the cost model chooses the nodes to send."""
    return config.selects_nodes_by_cost and can_measure(target)


def resolve_config(config: ConfigT, target: PreTrainedModel) -> ConfigT:
    """Return the config with its length policy and sizes filled in."""
    measures = can_measure(target)
    if config.length_policy == MEASURED and not measures:
        raise UnsupportedError(
            "length_policy='measured' is unsupported with tensor parallelism, because times differ "
            "among the processes; leave it out to use fixed sizes"
        )
    return config.resolve(measures)


def with_policy(
    config: ConfigT, target: PreTrainedModel, make: Callable[..., Drafter], children: int
) -> Drafter:
    """Return a drafter with the configured length policy, under the cost model if it applies.

    It is built as `make(config, policy=policy)`; `children` is the most children of a node.
    """
    by_cost = selects_nodes_by_cost(config, target)
    config = resolve_config(config, target)
    policy = make_policy(config, target)
    drafter = make(config, policy=policy)
    if config.length_policy != MEASURED and not by_cost:
        return drafter
    return adapt_length(drafter, target, config, min(children, NODES_PER_LEVEL))
