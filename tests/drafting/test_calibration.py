"""What rounds cost: calibrated by real ones, or given."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from hf_spec import OptionError
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.stopping import StopRules
from hf_spec.drafting import calibration
from hf_spec.drafting.calibration import (
    check_timings,
    known_costs,
    measure_costs,
)
from hf_spec.drafting.costs import Costs, Curve
from hf_spec.drafting.model_drafter import DraftModelDrafter
from hf_spec.execution.runner import ModelRunner
from hf_spec.strategies.draft_model import TreeConfig
from hf_spec.strategies.falcon import FalconConfig, FalconDrafter
from hf_spec.strategies.registry import make_drafter
from tests.falcon_reference import random_head
from tests.model_watch import snapshot
from tests.tiny_models import build, draft_model

TEXT = [[5, 6, 7, 8] * 4]


def state_of(rows: int, length: int = 6) -> GenerationState:
    ids = torch.arange(3, 3 + length).expand(rows, -1)
    return GenerationState.create(ids, torch.ones_like(ids), StopRules([], rows))


class TestTimings:
    def test_costs_from_timings(self) -> None:
        timings = {"verify": [[1, 1.0], [11, 2.0]], "draft": {"tree": [(2, 0.5)], "falcon": []}}
        with pytest.raises(OptionError):
            check_timings(timings)
        del timings["draft"]["falcon"]
        check_timings(timings)
        costs = Costs.of(timings)
        assert costs.verify(6) == 1.5
        assert costs.draft["tree"](1) == 0.25

    @pytest.mark.parametrize(
        "timings",
        [
            {"verify": [[1, 1.0]]},
            {"verify": [], "draft": {}},
            {"verify": [[1]], "draft": {}},
            {"verify": [[1, "a"]], "draft": {}},
            {"verify": [[1, True]], "draft": {}},
            {"verify": [[1, -1.0]], "draft": {}},
            {"verify": [[1, float("nan")]], "draft": {}},
            {"verify": [[1, 1.0]], "draft": [[1, 1.0]]},
            {"verify": [[1, 1.0]], "draft": {}, "other": 1},
            [1],
        ],
    )
    def test_anything_else_is_refused(self, timings: Any) -> None:
        with pytest.raises(OptionError, match="seconds of a forward by nodes"):
            check_timings(timings)


def drafters() -> dict[str, Any]:
    model = build("llama")
    return {
        "tree": DraftModelDrafter(TreeConfig(), draft_model("llama")),
        "falcon": make_drafter(FalconConfig(length_policy="static"), model, random_head("llama")),
    }


class TestMeasure:
    @pytest.mark.parametrize("rows", [1, 3])
    def test_every_part_is_timed(self, rows: int) -> None:
        with torch.no_grad():
            costs = measure_costs(build("llama"), drafters(), TEXT * rows)
        assert costs.verify.sizes == [rows, 4 * rows, 12 * rows, 24 * rows]
        assert costs.verify.seconds == sorted(costs.verify.seconds)
        assert set(costs.draft) == {"tree", "falcon"}
        for curve in costs.draft.values():
            assert curve.sizes == [0, 1, 2, 4]
            assert curve(0) == 0 < curve(1) <= curve(4)

    def test_models_without_the_attention_interface(self) -> None:
        with torch.no_grad():
            costs = measure_costs(build("bloom"), {}, TEXT * 2)
        assert costs.verify.sizes == [2, 8, 24, 48]

    def test_many_rows_keep_the_forwards_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes = []
        forward = ModelRunner.forward

        def watch(self: ModelRunner, tree: Any, *arguments: Any) -> Any:
            sizes.append(tree.num_nodes)
            return forward(self, tree, *arguments)

        monkeypatch.setattr(ModelRunner, "forward", watch)
        with torch.no_grad():
            costs = measure_costs(build("llama"), {}, TEXT * 40)
        assert costs.verify.sizes == [40, 80]
        assert max(sizes) == 80

    def test_time_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        forwards = []
        forward = ModelRunner.forward

        def watch(self: ModelRunner, *arguments: Any) -> Any:
            forwards.append(1)
            return forward(self, *arguments)

        monkeypatch.setattr(ModelRunner, "forward", watch)
        monkeypatch.setattr(calibration, "BUDGET", -1.0)
        with torch.no_grad():
            measure_costs(build("llama"), {}, TEXT)
        assert len(forwards) == 2 + 2 * 4

    def test_the_machine_is_what_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = itertools.count()
        monkeypatch.setattr(calibration.time, "perf_counter", lambda: float(next(ticks)))
        with torch.no_grad():
            costs = measure_costs(build("llama"), drafters(), TEXT)
        assert costs.verify.seconds == [1.0] * 4
        assert costs.draft["tree"].seconds == [0.0, 1.0, 1.0, 1.0]

    def test_models_and_drafters_are_as_they_were(self) -> None:
        model, draft, given = build("llama"), draft_model("llama"), drafters()
        before = snapshot(model), snapshot(draft), torch.get_rng_state()
        kept = {name: dict(vars(drafter)) for name, drafter in given.items()}
        with torch.no_grad():
            measure_costs(model, given, TEXT)
        assert (snapshot(model), snapshot(draft)) == before[:2]
        assert torch.equal(torch.get_rng_state(), before[2])
        for name, drafter in given.items():
            assert vars(drafter) == kept[name]
        assert isinstance(given["falcon"], FalconDrafter)


class TestKnownCosts:
    @pytest.fixture
    def measured(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        calls: list[Any] = []

        def measure(target: Any, drafters: Any, text: Any, batching: str) -> Costs:
            calls.append((list(drafters), text))
            return Costs(Curve([(1, 1.0)]), {})

        monkeypatch.setattr(calibration, "measure_costs", measure)
        return calls

    def test_measured_once_for_the_same_situation(self, measured: list[Any]) -> None:
        model = build("qwen2")
        known = [known_costs(model, drafters(), state_of(1), "unpadded") for _ in range(2)]
        assert len(measured) == 1
        assert known[0] is known[1]
        assert len(measured[0][1][0]) == calibration.CONTEXT
        known_costs(model, drafters(), state_of(2), "unpadded")
        assert len(measured) == 2
        assert len(measured[1][1]) == 2
        known_costs(model, {}, state_of(1), "unpadded")
        assert len(measured) == 3
        known_costs(build("qwen3"), {}, state_of(1), "unpadded")
        assert len(measured) == 4
        known_costs(model, {}, state_of(1), "padded")
        assert len(measured) == 5

    def test_another_number_of_threads(self, measured: list[Any]) -> None:
        model = build("gemma")
        known_costs(model, {}, state_of(1), "unpadded")
        torch.set_num_threads(2)
        known_costs(model, {}, state_of(1), "unpadded")
        assert len(measured) == 2
