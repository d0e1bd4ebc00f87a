"""What rounds cost on this machine: a short calibration by real forwards, or given timings.

The time of a forward of the target depends on how many tree nodes it runs, that of a draft on how
deep it goes; both are measured once per model and number of rows, on a text of sixteen tokens with
keys and values of its own, so that nothing of the generation is touched.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle

import torch
from transformers import PreTrainedModel

from hf_spec.decoding.drafter import Drafter
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.stopping import StopRules
from hf_spec.devices.placement import execution_device
from hf_spec.drafting.costs import Costs, machine_of
from hf_spec.errors import OptionError
from hf_spec.execution.cross_attention import attends_to_encoder, silence
from hf_spec.execution.per_model import made_once
from hf_spec.execution.runner import ModelRunner
from hf_spec.execution.tree import DraftTree, Verdict

# Nodes per row and depths of drafts that are timed; more than so many nodes in all are not.
NODE_COUNTS = (1, 4, 12, 24)
DEPTHS = (1, 2, 4)
MOST_NODES = 128
# Rounds that are not timed: they run the text itself.
WARM_UP = 2
# Each size is run at least twice, and again as long as there is time, in seconds.
SWEEPS = range(2, 7)
BUDGET = 0.25
CONTEXT = 16


def check_timings(timings: object) -> None:
    """Refuse what is no set of timings, and show what is expected (`OptionError`)."""
    curves: list[object] = []
    if isinstance(timings, dict) and set(timings) == {"verify", "draft"}:
        draft = timings["draft"]
        curves = [timings["verify"], *draft.values()] if isinstance(draft, dict) else []
    if not curves or not all(_is_curve(points) for points in curves):
        raise OptionError(
            f"timings={timings!r:.80} must be like {{'verify': [[1, 0.030], [16, 0.040]], 'draft': "
            "{'tree': [[1, 0.003], [4, 0.012]]}}: seconds of a forward by nodes, and of a draft by "
            "depth"
        )


def _is_curve(points: object) -> bool:
    return (
        isinstance(points, (list, tuple))
        and bool(points)
        and all(isinstance(point, (list, tuple)) and len(point) == 2 for point in points)
        and all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
            for point in points
            for value in point
        )
    )


def known_costs(
    target: PreTrainedModel, drafters: Mapping[str, Drafter], state: GenerationState, batching: str
) -> Costs:
    """The costs of a generation, measured if they are not known yet.

    They belong to the target, its device and dtype, the number of rows and of threads, what is
    padded, whether the target's weights are packed, and the drafters, of which none is active.
    """
    kinds = tuple((name, drafter.timing_key) for name, drafter in drafters.items())
    text = (state.tokens[0][:CONTEXT] * CONTEXT)[:CONTEXT]
    measure = partial(measure_costs, target, drafters, [text] * state.num_rows, batching)
    return made_once(target, ("auto", state.num_rows, batching, machine_of(target), kinds), measure)


def measure_costs(
    target: PreTrainedModel,
    drafters: Mapping[str, Drafter],
    text: Sequence[Sequence[int]],
    batching: str = "unpadded",
) -> Costs:
    """Time rounds in which every draft is refused, with copies of the drafters."""
    rounds = _Rounds(target, drafters, text, batching)
    verify: list[tuple[float, float]] = []
    draft: dict[str, list[tuple[float, float]]] = {name: [] for name in drafters}
    with ExitStack() as stack:
        rounds.enter(stack)
        for timed, width, depth in _schedule(len(text)):
            seconds, drafting = rounds.run(width, depth)
            if timed:
                verify.append((width * len(text), seconds))
                for name, spent in drafting.items():
                    draft[name].append((depth, spent))
    return Costs.of({"verify": verify, "draft": draft})


class _Rounds:
    """Rounds on a text of their own; the arguments are those of `measure_costs`."""

    def __init__(
        self,
        target: PreTrainedModel,
        drafters: Mapping[str, Drafter],
        text: Sequence[Sequence[int]],
        batching: str,
    ):
        self._device = execution_device(target.get_input_embeddings())
        self._drafters = {name: copy.copy(drafter) for name, drafter in drafters.items()}
        ids = torch.tensor(text, device=self._device)
        self._state = GenerationState.create(ids, torch.ones_like(ids), StopRules([], len(text)))
        layers = {layer for drafter in drafters.values() for layer in drafter.hidden_layers}
        self._runner = ModelRunner(target, len(text), sorted(layers), batching=batching)

    def enter(self, stack: ExitStack) -> None:
        """Make target and drafters ready."""
        stack.enter_context(self._runner.active())
        _hear_silence(self._runner)
        for drafter in self._drafters.values():
            stack.enter_context(drafter.active(self._state))
            drafter.prefill(_hear_silence)

    def run(self, width: int, depth: int) -> tuple[float, dict[str, float]]:
        """Seconds of a forward of `width` nodes per row, and of every drafter's draft."""
        state, rows = self._state, range(self._state.num_rows)
        limits = dict.fromkeys(rows, depth)
        trees, drafting = {}, {}
        for name, drafter in self._drafters.items():
            start = self._now()
            trees[name] = drafter.draft(state, limits)
            drafting[name] = self._now() - start
        chains = [
            ([text[-1], *(text * width)[: width - 1]], list(range(-1, width - 1)))
            for text in state.tokens
        ]
        tree = DraftTree.from_rows(chains)
        start = self._now()
        output = self._runner.forward(tree, state.tokens)
        seconds = self._now() - start
        nothing: list[list[int]] = [[] for _ in rows]
        bonus: list[int | None] = [text[0] for text in state.tokens]
        self._runner.keep(nothing)
        for row, text in enumerate(state.tokens):
            state.append(row, text[0])
        for name, drafter in self._drafters.items():
            seen = tree if drafter.hidden_layers else trees[name]
            drafter.observe(Verdict(seen, nothing, bonus), output)
        return seconds, drafting

    def _now(self) -> float:
        """Seconds, once the device is done."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def _hear_silence(runner: ModelRunner) -> None:
    """Give a decoder that attends to an encoder as much to attend to as it has in a generation."""
    if attends_to_encoder(runner.model):
        runner.attend_to(silence(runner.model, runner.pool.num_slots))


def _schedule(num_rows: int) -> Iterator[tuple[bool, int, int]]:
    """Rounds: whether they are timed, the nodes per row, and the depth of the drafts."""
    counts = [count for count in NODE_COUNTS if count * num_rows <= MOST_NODES]
    if len(counts) < 2:
        counts = [1, 2]
    depths = cycle(DEPTHS)
    yield from ((False, 1, 1) for _ in range(WARM_UP))
    start = time.perf_counter()
    for sweep in range(SWEEPS.stop):
        if sweep >= SWEEPS.start and time.perf_counter() - start > BUDGET:
            break
        # Drafts of every depth, however few sizes there are.
        yield from ((True, count, next(depths)) for count in (counts * 2)[:4])
