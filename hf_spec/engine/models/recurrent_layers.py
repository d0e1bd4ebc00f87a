"""A recurrent mixer by itself: how it is recognised, the states of its rows, one call of it.

A *mixer* is a module of transformers that keeps a state of a sequence instead of keys and values:
linear attention, a state-space model or a short convolution. Which tokens it is called with is the
matter of `hf_spec.engine.models.recurrent_state`.
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

# Of R sequences: the convolution's (R, channels, width), and of all but bare convolutions the
# recurrence's (R, ...).
State = list[Tensor]

# A state by the batch of states that it is in and its place there.
Start = tuple[int, int]
# The batch of the rows' own states. Those at the ends of paths are numbered from 0.
COMMITTED = -1
# Kinds of layers by what they keep: a state (in the last one beside keys and values), or nothing.
RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid")
PASTLESS_LAYERS = ("moe", "mlp")


def _writes_state(module: nn.Module) -> bool:
    """Whether a module writes a state into the cache; read in its code."""
    kind: Any = type(module)
    return _class_writes_state(kind)


@cache
def _class_writes_state(kind: Any) -> bool:
    try:
        return ".update_conv_state(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False


def _cache_name(module: nn.Module) -> str | None:
    """The name under which a module takes the cache, if it is called as mixers are."""
    forward: Any = type(module).forward
    if not {"hidden_states", "attention_mask"} <= set(inspect.signature(forward).parameters):
        return None
    return cache_parameter(forward)


def stateful_modules(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that keep a state in its cache."""
    return [m for m in model.modules() if hasattr(m, "layer_idx") and _writes_state(m)]


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """Those of them that are called as mixers are: with hidden states, the cache and a mask."""
    return [module for module in stateful_modules(model) if _cache_name(module) is not None]


def num_recurrent_layers(config: PreTrainedConfig) -> int:
    """How many layers of a text model keep a state."""
    return sum(map(_kinds(config).count, RECURRENT_LAYERS))


def recurrent_share(config: PreTrainedConfig) -> float:
    """Share of the layers of a text model that keep a state."""
    return num_recurrent_layers(config) / config.num_hidden_layers


def num_attention_layers(config: PreTrainedConfig) -> int:
    """How many layers of a text model attend."""
    kinds = _kinds(config)
    others = sum(map(kinds.count, PASTLESS_LAYERS)) - kinds.count("hybrid")
    return config.num_hidden_layers - num_recurrent_layers(config) - others


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())[: config.num_hidden_layers]


def resumes(model: PreTrainedModel) -> bool:
    """Whether all mixers go on from a state with several tokens at once.

    The scan of Mamba-1 in transformers (5.23) begins at zero wherever it is called with more than
    one token. Tried out once per model.
    """
    return all(mixer_resumes(model, mixer) for mixer in mixers_of(model))


def mixer_resumes(model: PreTrainedModel, mixer: nn.Module) -> bool:
    """The same of one mixer."""
    return cached_per_model(model, ("resumes", type(mixer)), lambda: _heeds_state(model, mixer))


@torch.no_grad()
def _heeds_state(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether the state that a call of two tokens is given makes a difference to it."""
    mixer = Mixer(module, num_rows=1, resumes=True)
    width = model.config.get_text_config().hidden_size
    inputs = torch.ones(1, 2, width, dtype=model.dtype, device=execution_device(module))
    _, (convolved, *recurrent) = mixer.run(inputs, None)
    if not recurrent:
        return True
    states = [[convolved, torch.full_like(recurrent[0], value)] for value in (0, 1)]
    (zeros, after_zeros), (ones, after_ones) = (mixer.run(inputs, state) for state in states)
    return not (torch.equal(zeros, ones) and torch.equal(after_zeros[-1], after_ones[-1]))


class Places:
    """Indices, for all mixers on a device sent there once."""

    def __init__(self, places: Sequence[int] | Sequence[Sequence[int]]):
        self._host = torch.tensor(places, dtype=torch.long)
        self._sent: dict[torch.device, Tensor] = {}
        self.count = self._host.numel()

    def of(self, other: Tensor) -> Tensor:
        """The indices where another tensor is."""
        if other.device not in self._sent:
            self._sent[other.device] = send([self._host], other.device)[0]
        return self._sent[other.device]


@dataclass(frozen=True)
class Call:
    """R stretches of T tokens for one call of every mixer.

    Attributes:
        rows: (R,) the row of each stretch.
        starts: the states that they begin from; None where those are the rows' own.
        index: (R, T) where the inputs are among those given.
        fresh: whether no row has a state yet.
    """

    rows: Places
    starts: list[Start] | None
    index: Places
    fresh: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        starts: Sequence[Start | None],
        index: Sequence[Sequence[int]],
        begun: set[int],
    ) -> Call:
        """From the rows that have a state, and starts that are None for the row's own."""
        known = [start or (COMMITTED, row) for row, start in zip(rows, starts, strict=True)]
        return cls(
            Places(rows),
            known if any(starts) else None,
            Places(index),
            fresh=not any(starts) and begun.isdisjoint(rows),
        )


@dataclass(frozen=True)
class Step:
    """One forward, as every mixer sees it.

    Attributes:
        pending: stretches of the tokens that are committed; (R, T) places among the tokens.
        paths: paths of nodes; (R, T) places among the inputs kept in the round.
        nodes: (n,) where the nodes are among the tokens.
        found: (n,) where among the R * T outputs of `paths` that of each node is.
        batch: number of the states at the ends of the paths; None if they are not kept.
        used: the batches of states that are still needed.
    """

    pending: list[Call]
    paths: Call | None
    nodes: Places
    found: Places
    batch: int | None
    used: set[int]


class Mixer:
    """One module, the states of its rows, and what came in at the nodes of the round."""

    def __init__(self, module: nn.Module, num_rows: int, resumes: bool):
        self.module = module
        self.index: Any = module.layer_idx
        self.states: dict[int, State] = {}
        self._num_rows = num_rows
        self._resumes = resumes
        self._cache_name = _cache_name(module) or ""
        self._inputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, step: Step) -> Tensor:
        """The outputs for (B, T, width) hidden states; zeros where the step has no token."""
        tokens = hidden_states.flatten(0, 1)
        outputs = torch.zeros_like(tokens)
        for call in step.pending:
            found, state = self._call(tokens, call)
            outputs[call.index.of(tokens)] = found
            self._commit(call.rows, state)
        if step.paths is not None:
            places = step.nodes.of(tokens)
            new = tokens[places]
            self._inputs = new if self._inputs is None else torch.cat([self._inputs, new])
            found, state = self._call(self._inputs, step.paths)
            outputs[places] = found.flatten(0, 1)[step.found.of(tokens)]
            self.states = {n: kept for n, kept in self.states.items() if n in step.used}
            if step.batch is not None:
                self.states[step.batch] = state
        return outputs.view_as(hidden_states)

    def replay(self, call: Call) -> None:
        """Commit the state after a path of nodes; without tokens, the one that it begins from."""
        assert self._inputs is not None, "nodes are kept after they have run"
        known = call.index.count == 0
        state = self._gather(call) if known else self._call(self._inputs, call)[1]
        self._commit(call.rows, state)

    def end_round(self) -> None:
        """Forget what came in at the nodes, and the states after them."""
        self._inputs = None
        self.states = {COMMITTED: self.states[COMMITTED]} if COMMITTED in self.states else {}

    def restart(self, row: int) -> None:
        """Begin a sequence: a state of zeros is that of no token."""
        for part in self.states.get(COMMITTED, ()):
            part[row] = 0

    def _call(self, inputs: Tensor, call: Call) -> tuple[Tensor, State]:
        return self.run(inputs[call.index.of(inputs)], None if call.fresh else self._gather(call))

    def _gather(self, call: Call) -> State:
        if call.starts is None:
            return [part[call.rows.of(part)] for part in self.states[COMMITTED]]
        chosen = [[part[place] for part in self.states[batch]] for batch, place in call.starts]
        return [torch.stack(parts) for parts in zip(*chosen, strict=True)]

    def _commit(self, rows: Places, state: State) -> None:
        if COMMITTED not in self.states:
            shapes = ((self._num_rows, *part.shape[1:]) for part in state)
            self.states[COMMITTED] = [p.new_zeros(s) for p, s in zip(state, shapes, strict=True)]
        for mine, part in zip(self.states[COMMITTED], state, strict=True):
            mine[rows.of(mine)] = part

    def run(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Outputs for (R, T, width) inputs from a state, and the state after them.

        The mixer gets a cache of transformers' own, which holds copies: some kernels write into the
        state that they are given.
        """
        layer = LinearAttentionLayer()
        kept = Cache(layers=[layer] * (self.index + 1))
        if state is not None:
            kept.update_conv_state(state[0], self.index)
            for part in state[1:]:
                kept.update_recurrent_state(part, self.index)
        # A scan that begins at zero is right where nothing came before.
        parts = [inputs] if self._resumes or state is None else inputs.split(1, dim=1)
        plain: Any = self.module.forward
        plain = getattr(plain, "plain", plain)
        outputs = torch.cat([plain(p, **{self._cache_name: kept}) for p in parts], dim=1)
        after = (layer.conv_states[0], layer.recurrent_states[0])
        return outputs, [part for part in after if part is not None]

    def load(self, kept: Any) -> None:
        """Take the states of all rows from the layer of a cache."""
        after = (kept.conv_states[0], kept.recurrent_states[0])
        self.states = {COMMITTED: [part.clone() for part in after if part is not None]}

    def export(self, kept: Cache) -> None:
        """Write the states of all rows into a new cache."""
        parts = self.states[COMMITTED]
        kept.update_conv_state(parts[0], self.index)
        for part in parts[1:]:
            kept.update_recurrent_state(part, self.index)
