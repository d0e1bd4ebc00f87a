"""Recurrent mixers: which modules they are, the states of their rows, and a call of one mixer.

A *mixer* is a module of transformers that caches a state of a sequence instead of keys and values:
linear attention, a state-space model or a short convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_spec.backend.device.placement import execution_device
from hf_spec.backend.device.transfer import send
from hf_spec.common.compat import cache_parameter
from hf_spec.engine.forward.model_cache import cached_per_model

# State of R sequences: (R, channels, width) of the convolution and, except for bare convolutions,
# (R, ...) of the recurrence.
State = list[Tensor]

# Reference to a state: the number of its batch, and its index there.
Start = tuple[int, int]
# Number of the batch with the rows' committed states. Batches at the ends of paths count from 0.
COMMITTED = -1
# Kinds of layers that cache a state ("hybrid": beside keys and values), and that cache nothing.
RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid")
PASTLESS_LAYERS = ("moe", "mlp")


@cache
def _writes_state(kind: Any) -> bool:
    """Return True if modules of a class write a state into the cache, by their source code."""
    try:
        return ".update_conv_state(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _cache_name(module: nn.Module) -> str | None:
    forward: Any = type(module).forward
    if not {"hidden_states", "attention_mask"} <= set(inspect.signature(forward).parameters):
        # It is not called like a mixer.
        return None
    return cache_parameter(forward)


def stateful_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have a state in its cache."""
    stateful = []
    for module in model.modules():
        kind: Any = type(module)
        if hasattr(module, "layer_idx") and _writes_state(kind):
            stateful.append(module)
    return stateful


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """Return the stateful modules that are called with hidden states, the cache and a mask."""
    return [module for module in stateful_modules(model) if _cache_name(module) is not None]


def num_recurrent_layers(config: PreTrainedConfig) -> int:
    """Return the number of layers of a text model that cache a state."""
    return sum(map(_kinds(config).count, RECURRENT_LAYERS))


def recurrent_share(config: PreTrainedConfig) -> float:
    """Return the share of a text model's layers that cache a state."""
    return num_recurrent_layers(config) / config.num_hidden_layers


def num_attention_layers(config: PreTrainedConfig) -> int:
    """Return the number of attention layers of a text model."""
    kinds = _kinds(config)
    others = sum(map(kinds.count, PASTLESS_LAYERS)) - kinds.count("hybrid")
    return config.num_hidden_layers - num_recurrent_layers(config) - others


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())[: config.num_hidden_layers]


def resumes(model: PreTrainedModel) -> bool:
    """Return True if all mixers can continue from a state with several tokens at once.

    The scan of Mamba-1 in transformers (5.23) starts from zero when it gets more than one token.
    """
    return all(mixer_resumes(model, mixer) for mixer in mixers_of(model))


def mixer_resumes(model: PreTrainedModel, mixer: nn.Module) -> bool:
    """Return `resumes` of one mixer, tested once per model."""
    key = "resumes", type(mixer)
    return cached_per_model(model, key, lambda: _depends_on_state(model, mixer))


@torch.no_grad()
def _depends_on_state(model: PreTrainedModel, module: nn.Module) -> bool:
    mixer = Mixer(module, num_rows=1, resumes=True)
    width = model.config.get_text_config().hidden_size
    inputs = torch.ones(1, 2, width, dtype=model.dtype, device=execution_device(module))
    _, (convolved, *recurrent) = mixer.run(inputs, None)
    if not recurrent:
        return True
    states = [[convolved, torch.full_like(recurrent[0], value)] for value in (0, 1)]
    (zeros, after_zeros), (ones, after_ones) = (mixer.run(inputs, state) for state in states)
    return not (torch.equal(zeros, ones) and torch.equal(after_zeros[-1], after_ones[-1]))


class Indices:
    """Indices that are copied once to each device that has mixers."""

    def __init__(self, indices: Sequence[int] | Sequence[Sequence[int]]):
        self._host = torch.tensor(indices, dtype=torch.long)
        self._sent: dict[torch.device, Tensor] = {}
        self.count = self._host.numel()

    def of(self, other: Tensor) -> Tensor:
        """Return the indices on the device of another tensor."""
        if other.device not in self._sent:
            self._sent[other.device] = send([self._host], other.device)[0]
        return self._sent[other.device]


@dataclass(frozen=True)
class MixerCall:
    """R runs of T tokens for one call of every mixer."""

    # (R,) row of each run.
    rows: Indices
    # States before the runs; None if all are the rows' committed states.
    starts: list[Start] | None
    # (R, T) indices of the inputs.
    index: Indices
    # True if no row has a state yet.
    fresh: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        starts: Sequence[Start | None],
        index: Sequence[Sequence[int]],
        begun: set[int],
    ) -> MixerCall:
        """Build a call; a start of None is the committed state, and rows in `begun` have one."""
        if not any(starts):
            return cls(Indices(rows), None, Indices(index), fresh=begun.isdisjoint(rows))
        resolved = [start or (COMMITTED, row) for row, start in zip(rows, starts, strict=True)]
        return cls(Indices(rows), resolved, Indices(index), fresh=False)


@dataclass(frozen=True)
class MixerStep:
    """Calls of every mixer in one forward pass."""

    # Runs of pending tokens; indices into the tokens of the pass.
    pending: list[MixerCall]
    # Paths of nodes; indices into the node inputs collected in the round.
    paths: MixerCall | None
    # (n,) indices of the nodes among the tokens, and among the R * T outputs of `paths`.
    nodes: Indices
    outputs: Indices
    # Number of the batch of states at the ends of the paths; None to drop them.
    batch: int | None
    # Numbers of the batches that are still needed.
    used: set[int]


class Mixer:
    """One module, the states of its rows, and its inputs at the nodes of the round."""

    def __init__(self, module: nn.Module, num_rows: int, resumes: bool):
        self.module = module
        self.index: Any = module.layer_idx
        self.states: dict[int, State] = {}
        self._num_rows = num_rows
        self._resumes = resumes
        self._cache_name = _cache_name(module) or ""
        self._inputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, step: MixerStep) -> Tensor:
        """Return the outputs for (B, T, width) hidden states; zeros where the step has no token."""
        tokens = hidden_states.flatten(0, 1)
        outputs = torch.zeros_like(tokens)
        for call in step.pending:
            outputs[call.index.of(tokens)], state = self._call(tokens, call)
            self._commit(call.rows, state)
        if step.paths is not None:
            nodes = step.nodes.of(tokens)
            new = tokens[nodes]
            self._inputs = new if self._inputs is None else torch.cat([self._inputs, new])
            path_outputs, state = self._call(self._inputs, step.paths)
            outputs[nodes] = path_outputs.flatten(0, 1)[step.outputs.of(tokens)]
            self.states = {n: states for n, states in self.states.items() if n in step.used}
            if step.batch is not None:
                self.states[step.batch] = state
        return outputs.view_as(hidden_states)

    def replay(self, call: MixerCall) -> None:
        """Commit the state after a path of nodes, or its start if the path has no tokens."""
        assert self._inputs is not None, "nodes are kept after they have run"
        is_empty = call.index.count == 0
        state = self._gather(call) if is_empty else self._call(self._inputs, call)[1]
        self._commit(call.rows, state)

    def end_round(self) -> None:
        """Drop the inputs at the nodes, and the states after them."""
        self._inputs = None
        self.states = {COMMITTED: self.states[COMMITTED]} if COMMITTED in self.states else {}

    def restart(self, row: int) -> None:
        """Begin a sequence: the state before the first token is zero."""
        for part in self.states.get(COMMITTED, ()):
            part[row] = 0

    def _call(self, inputs: Tensor, call: MixerCall) -> tuple[Tensor, State]:
        return self.run(inputs[call.index.of(inputs)], None if call.fresh else self._gather(call))

    def _gather(self, call: MixerCall) -> State:
        if call.starts is None:
            return [part[call.rows.of(part)] for part in self.states[COMMITTED]]
        starts = [[part[index] for part in self.states[batch]] for batch, index in call.starts]
        return [torch.stack(parts) for parts in zip(*starts, strict=True)]

    def _commit(self, rows: Indices, state: State) -> None:
        if COMMITTED not in self.states:
            shapes = ((self._num_rows, *part.shape[1:]) for part in state)
            self.states[COMMITTED] = [p.new_zeros(s) for p, s in zip(state, shapes, strict=True)]
        for committed, part in zip(self.states[COMMITTED], state, strict=True):
            committed[rows.of(committed)] = part

    def run(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Return the outputs for (R, T, width) inputs after a state, and the state after them.

        The mixer gets a cache of transformers with copies, since some kernels write into the state
        that they read.
        """
        layer = LinearAttentionLayer()
        cache = Cache(layers=[layer] * (self.index + 1))
        if state is not None:
            self._write(cache, state)
        # A scan that starts from zero is right for the first tokens of a sequence.
        parts = [inputs] if self._resumes or state is None else inputs.split(1, dim=1)
        plain: Any = self.module.forward
        plain = getattr(plain, "plain", plain)
        outputs = torch.cat([plain(p, **{self._cache_name: cache}) for p in parts], dim=1)
        return outputs, _state_of(layer)

    def load(self, layer: Any) -> None:
        """Copy the states of all rows from the layer of a cache."""
        self.states = {COMMITTED: [part.clone() for part in _state_of(layer)]}

    def export(self, cache: Cache) -> None:
        """Write the states of all rows into a new cache."""
        self._write(cache, self.states[COMMITTED])

    def _write(self, cache: Cache, state: State) -> None:
        cache.update_conv_state(state[0], self.index)
        for part in state[1:]:
            cache.update_recurrent_state(part, self.index)


def _state_of(layer: Any) -> State:
    """Return the state in the layer of a cache."""
    parts = layer.conv_states[0], layer.recurrent_states[0]
    return [part for part in parts if part is not None]
