"""Texts that a model generates, recorded with the hidden states that a head reads.

The states were computed for the generation anyway, so a head can be trained beside its target
without further forward passes of it (`hf_spec.methods.refreshing`).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.training.features import Text, num_features
from hf_spec.training.responses import Response
from hf_spec.training.trainer import Loss, MicroBatch


@dataclass(frozen=True)
class OnlineTraining:
    """How a method trains a head beside its target.

    Attributes:
        head: the head, cached on the target, so generations use the same one.
        layers: indices of the target's `hidden_states` in `Text.features`.
        trained: returns the trained parameters.
        make_loss: returns the loss for the target's current weights.
    """

    head: nn.Module
    layers: Sequence[int]
    trained: Callable[[], Sequence[nn.Parameter]]
    make_loss: Callable[[], Callable[[MicroBatch[Text]], Loss]]


@dataclass
class Rollout:
    """A text that is generated: its tokens, which grow, and (n, L * H) states of its first n."""

    tokens: list[int]
    prompt_length: int
    states: list[Tensor] = field(default_factory=list)

    def text(self) -> Text:
        """Return prompt and answer with the features of all tokens but the last."""
        prompt, answer = self.tokens[: self.prompt_length], self.tokens[self.prompt_length :]
        response = Response("rollout", "", prompt, answer)
        return Text(response, torch.cat(self.states)[: num_features(response)])


class RolloutRecorder:
    """Recorder of the latest texts that a head drafts for, up to `max_tokens` in all.

    Texts that continue the cache of an earlier call are left out, because their first states are
    unknown.
    """

    def __init__(self, layers: Sequence[int], max_tokens: int):
        self.layers = tuple(layers)
        self._max_tokens = max_tokens
        self._rollouts: deque[Rollout] = deque()
        self._num_tokens = 0
        # Generations may run in several threads.
        self._lock = threading.Lock()

    def record(
        self,
        tokens: Sequence[list[int]],
        generated: Sequence[int],
        indices: Mapping[int, Sequence[int]],
        output: ForwardOutput,
    ) -> None:
        """Record a round: `indices` are each row's new tokens in the states of `output`.

        `tokens` and `generated` are those of the `GenerationState` after the round.
        """
        with self._lock:
            by_text = {id(rollout.tokens): rollout for rollout in self._rollouts}
            for row, row_indices in indices.items():
                rollout = by_text.get(id(tokens[row]))
                if rollout is None:
                    # The first round of a text has the states of all tokens but the last.
                    if len(row_indices) < len(tokens[row]) - 1:
                        continue
                    rollout = Rollout(tokens[row], len(tokens[row]) - generated[row])
                    self._rollouts.append(rollout)
                states = [output.hidden[layer][list(row_indices)] for layer in self.layers]
                device = states[0].device
                joined = torch.cat([state.to(device) for state in states], dim=-1)
                rollout.states.append(joined.detach().to(torch.bfloat16))
                self._num_tokens += len(row_indices)
            while self._num_tokens > self._max_tokens and len(self._rollouts) > 1:
                dropped = self._rollouts.popleft()
                self._num_tokens -= sum(map(len, dropped.states))

    def take(self) -> list[Text]:
        """Return the recorded texts with at least one new token, and forget them."""
        with self._lock:
            rollouts, self._rollouts = self._rollouts, deque()
            self._num_tokens = 0
        return [
            rollout.text() for rollout in rollouts if len(rollout.tokens) > rollout.prompt_length
        ]
