"""Times of queued work on a device, measured without synchronizing."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from transformers import MaxLengthCriteria

from hf_spec import DraftConfig
from hf_spec.backend.device import transfer
from hf_spec.backend.device.clock import Clock, DeviceClock, Stopwatch, clock_of
from hf_spec.drafting.cost_model import cost_model_drafter as measured
from hf_spec.drafting.cost_model.adaptive_length_drafter import AdaptiveLengthDrafter, adapt_length
from hf_spec.drafting.cost_model.cost_curves import RoundTimes
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.decode.loop import finish_step, speculative_step
from hf_spec.engine.decode.stopping import StopRules
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner
from hf_spec.methods.draft_model.drafter import DraftModelDrafter
from tests import tiny_models
from tests.fake_gpu import DEVICE, FakeGpu, OnGpu, on_gpu, pretended

CPU = torch.device("cpu")
# Seconds per operation on the device, long enough to make the time of the host negligible.
LAUNCH = 10.0


def test_a_host_clock_is_the_hosts() -> None:
    clock = clock_of(CPU)
    assert type(clock) is Clock
    start = clock.mark()
    time.sleep(0.01)
    end = clock.mark()
    assert clock.passed(end)
    assert clock.seconds(start, end) >= 0.01


@pytest.mark.parametrize("streams", [True, False], ids=["cuda", "mps"])
def test_work_on_a_device_counts_where_it_was_queued(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretended(monkeypatch, streams) as gpu:
        clock = clock_of(DEVICE)
        assert isinstance(clock, DeviceClock)
        watch = Stopwatch(clock)
        numbers = torch.ones(3, device=DEVICE)
        gpu.restart()
        gpu.launch_seconds = LAUNCH
        marks = [clock.mark()]
        for operations in (2, 3):
            for _ in range(operations):
                numbers = numbers + 1
            marks.append(clock.mark())
        watch.add("first", *marks[:2])
        watch.add("second", *marks[1:])
        # The times are unknown until the host has waited.
        assert watch.read() == {}
        assert not clock.passed(marks[0])
        transfer.fetch(numbers)
        assert watch.read() == pytest.approx({"first": 2 * LAUNCH, "second": 3 * LAUNCH})
        watch.add("first", marks[0], marks[-1])
        assert watch.read()["first"] == pytest.approx(7 * LAUNCH)
        # Only the fetch may wait; it does so without pinned memory.
        assert (gpu.fetches, sum(gpu.waits.values())) == (1, 0 if streams else 1)


class Hasty(DraftModelDrafter):
    """Drafter of constant tokens that keeps the device busy and never waits.

    `work` operations are queued with every draft, as if the draft stayed on the device.
    """

    work = 500

    def draft(self, state: GenerationState, limits: Mapping[int, int]) -> DraftTree:
        numbers = torch.ones(1, device=state.device)
        drafts = {}
        for row, limit in limits.items():
            length = min(limit, 2)
            drafts[row] = [state.tokens[row][-1], *[7] * length], range(-1, length)
            self._runner.forwards += length
        for _ in range(self.work if any(limits.values()) else 0):
            numbers = numbers + 1
        return DraftTree.from_drafts(drafts, state.num_rows)

    def observe(self, verdict: Any, output: Any) -> None:
        """Keep nothing."""


def begun(gpu: FakeGpu, new_tokens: int) -> GenerationState:
    ids, mask = (OnGpu(tensor) for tensor in tiny_models.ragged_batch((9,)).values())
    stop = StopRules([MaxLengthCriteria(ids.shape[1] + new_tokens)], 1)
    gpu.launch_seconds = LAUNCH
    return GenerationState.create(ids, mask, stop)


@torch.no_grad()
def test_drafts_and_forwards_have_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics have the times of the device, although the host only queues work."""
    with pretended(monkeypatch) as gpu:
        drafter = Hasty(DraftConfig(), on_gpu(tiny_models.draft_model("llama")), LengthPolicy(2))
        target = ModelRunner(on_gpu(tiny_models.build("llama")), 1)
        state = begun(gpu, 6)
        with target.active(), drafter.active(state):
            verifier = drafter.make_verifier([], 1)
            rounds = 0
            while state.unfinished:
                gpu.restart()
                speculative_step(target, drafter, verifier, state)
                # One fetch for the verdict, and none for the clocks.
                assert (gpu.fetches, gpu.waits) == (1, {})
                rounds += 1
        state.finish()
    stats = state.stats
    drafting = (Hasty.work + 1) * LAUNCH
    assert rounds > 3
    # The last round has room for the bonus token only.
    assert drafting * (rounds - 1) <= stats.draft_seconds <= drafting * rounds
    # Verification is the target's forward pass and the verdict.
    assert 50 * LAUNCH * rounds < stats.verify_seconds < 150 * LAUNCH * rounds


@torch.no_grad()
def test_a_measured_draft_is_charged_for_what_it_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    learned: list[tuple[float, float, dict[str, tuple[int, int, float]]]] = []
    monkeypatch.setattr(measured, "cached_times", lambda *_: RoundTimes())
    monkeypatch.setattr(RoundTimes, "learn", lambda _, *times: learned.append(times))
    with pretended(monkeypatch) as gpu:
        config = DraftConfig(max_draft_tokens=2)
        inner = Hasty(config, on_gpu(tiny_models.draft_model("llama")), LengthPolicy(2))
        model = on_gpu(tiny_models.build("llama"))
        drafter = adapt_length(inner, model, config, 1)
        assert isinstance(drafter, AdaptiveLengthDrafter)
        target = ModelRunner(model, 1)
        state = begun(gpu, 12)
        with target.active(), drafter.active(state):
            verifier = drafter.make_verifier([], 1)
            known = []
            while state.unfinished:
                gpu.restart()
                tree = drafter.draft(state, state.draft_limits)
                known.append(len(learned))
                readout = verifier.readout(tree, state)
                output = target.forward(tree, state.tokens, readout=readout)
                finish_step(target, drafter, verifier, state, tree, output)
                assert (gpu.fetches, gpu.waits) == (1, {})
    drafts = [spent["draft"] for *_, spent in learned if "draft" in spent]
    assert len(drafts) > 2
    for forwards, _, seconds in drafts:
        busy = Hasty.work + 1 if forwards else 1
        assert seconds == pytest.approx(busy * LAUNCH)
    for _, seconds, _ in learned:
        assert 50 * LAUNCH < seconds < 200 * LAUNCH
    # The times of a round are learned in the next round.
    assert known == [max(0, number - 2) for number in range(len(known))]
