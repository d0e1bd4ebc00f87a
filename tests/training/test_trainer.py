"""The training loop: it learns; resuming or splitting batches does not change the result."""

from __future__ import annotations

import copy
import json
import os
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from safetensors.torch import save_file
from torch import Tensor, nn

from hf_spec import OptionError
from hf_spec.training import trainer
from hf_spec.training.answers import target_facts
from hf_spec.training.trainer import (
    CHECKPOINT,
    METRICS,
    RUN,
    TrainSettings,
    micro_batches,
    mixed_precision,
    record_start,
    shuffled_batches,
    train,
    with_options,
)
from tests.tiny_models import build

SETTINGS = TrainSettings(epochs=2, learning_rate=0.05, evaluate_every=4, save_every=3)
LENGTHS = [1 + i % 5 for i in range(60)]


class Line:
    """Line fitted to noisy points; the noise makes the result depend on the random state."""

    def __init__(self) -> None:
        self.slope = nn.Parameter(torch.zeros(2))
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(60, 2, generator=generator)
        self.outputs = self.inputs @ torch.tensor([1.0, -2.0])
        self.stop_at: int | None = None
        self.calls = 0

    def loss(self, batch: list[int]) -> tuple[Tensor, int]:
        self.calls += 1
        if self.calls == self.stop_at:
            raise KeyboardInterrupt
        inputs = self.inputs[batch] + 0.01 * torch.randn(len(batch), 2)
        return ((inputs @ self.slope - self.outputs[batch]) ** 2).sum(), len(batch)

    def epochs(self, epoch: int) -> list[list[int]]:
        return shuffled_batches(LENGTHS, 30, 0, epoch)

    def fit(self, folder: Path, settings: TrainSettings = SETTINGS, **options: Any) -> Tensor:
        train({"slope": self.slope}, self.loss, self.epochs, settings, folder, **options)
        return self.slope.detach()


def metrics(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def test_it_learns_and_reports(tmp_path: Path) -> None:
    line = Line()
    settings = replace(SETTINGS, epochs=20)
    slope = line.fit(tmp_path, settings, evaluate=lambda: {"slope": float(line.slope[0])})
    torch.testing.assert_close(slope, torch.tensor([1.0, -2.0]), atol=0.1, rtol=0)
    rows = metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["loss"] < rows[0]["loss"] / 20
    assert [("slope" in row) for row in rows[:5]] == [False, False, False, True, False]
    assert rows[-1]["slope"] == float(slope[0])


class TestTrackers:
    @pytest.fixture
    def logged(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Return the calls of a fake TensorBoard tracker; the real one needs another package."""
        calls: list[Any] = []

        class Tracker(GeneralTracker):
            name, requires_logging_directory, main_process_only = "tensorboard", True, True

            def __init__(self, run_name: str, logging_dir: str, **_: Any):
                super().__init__()
                calls.append(("start", run_name, str(logging_dir)))

            @property
            def tracker(self) -> None:
                return None

            def store_init_configuration(self, values: dict[str, Any]) -> None:
                calls.append(("settings", values))

            def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
                calls.append((step, values))

            def finish(self) -> None:
                calls.append(("finish",))

        for module in ("accelerate.tracking", "hf_spec.training.trainer"):
            monkeypatch.setattr(
                f"{module}.get_available_trackers", lambda: [LoggerType.TENSORBOARD]
            )
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", Tracker)
        return calls

    def test_losses_and_figures_are_logged(self, tmp_path: Path, logged: list[Any]) -> None:
        line, settings = Line(), replace(SETTINGS, log_with="tensorboard")
        line.fit(tmp_path, settings, evaluate=lambda: {"slope": float(line.slope[0])})
        assert logged[0] == ("start", "hf-spec", str(tmp_path))
        assert logged[1][1]["learning_rate"] == SETTINGS.learning_rate
        assert logged[-1] == ("finish",)
        rows = [json.loads(text) for text in (tmp_path / METRICS).read_text().splitlines()]
        assert [step for step, _ in logged[2:-1]] == [row.pop("step") for row in rows]
        assert [values for _, values in logged[2:-1]] == rows
        assert any("slope" in values for _, values in logged[2:-1])

    def test_a_run_may_resume_with_another_tracker(self, tmp_path: Path, logged: list[Any]) -> None:
        whole = Line().fit(tmp_path / "whole")
        broken = Line()
        broken.stop_at = 5
        with pytest.raises(KeyboardInterrupt):
            broken.fit(tmp_path / "broken")
        settings = replace(SETTINGS, log_with="tensorboard")
        assert torch.equal(Line().fit(tmp_path / "broken", settings), whole)
        assert len(logged) > 3

    def test_a_tracker_must_be_installed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        settings = replace(SETTINGS, log_with="wandb")
        monkeypatch.setattr("hf_spec.training.trainer.get_available_trackers", list)
        with pytest.raises(OptionError, match="pip install wandb"):
            Line().fit(tmp_path, settings)


@pytest.mark.parametrize("stop_at", [2, 5, 8, 9])
def test_a_resumed_run_equals_an_unbroken_one(tmp_path: Path, stop_at: int) -> None:
    whole = Line().fit(tmp_path / "whole")
    broken = Line()
    broken.stop_at = stop_at
    with pytest.raises(KeyboardInterrupt):
        broken.fit(tmp_path / "broken")
    assert torch.equal(Line().fit(tmp_path / "broken"), whole)
    assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")


def test_a_finished_run_stays_finished(tmp_path: Path) -> None:
    whole = Line().fit(tmp_path).clone()
    again = Line()
    assert torch.equal(again.fit(tmp_path), whole)
    assert again.calls == 0


class Texts(Line):
    """Line with a different number of batches per epoch; `seen` records the inputs of each step."""

    NUM_BATCHES = (5, 3, 0, 8)

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def loss(self, batch: list[int]) -> tuple[Tensor, int]:
        loss = super().loss(batch)
        self.seen += batch
        return loss

    def epochs(self, epoch: int) -> list[list[int]]:
        count = self.NUM_BATCHES[epoch]
        return [list(range(first, 60, count)) for first in range(count)]


class TestEpochsOfDifferentLengths:
    settings = replace(SETTINGS, epochs=4, save_every=1)

    @pytest.mark.parametrize(("accumulate", "num_steps"), [(1, 16), (2, 9), (3, 6), (9, 3)])
    def test_every_text_once_in_every_epoch(
        self, tmp_path: Path, accumulate: int, num_steps: int
    ) -> None:
        texts = Texts()
        texts.fit(tmp_path, replace(self.settings, accumulate=accumulate))
        epochs = [texts.seen[start : start + 60] for start in range(0, len(texts.seen), 60)]
        assert [sorted(epoch) for epoch in epochs] == [list(range(60))] * 3
        rows = metrics(tmp_path)
        assert len(rows) == num_steps
        assert sum(row["tokens"] for row in rows) == 180
        assert rows[-1]["rate"] == self.settings.rate(num_steps - 1, num_steps)

    @pytest.mark.parametrize("stop_at", [4, 6, 7, 8, 9, 15])
    def test_a_resumed_run_goes_on_in_its_epoch(self, tmp_path: Path, stop_at: int) -> None:
        settings = replace(self.settings, accumulate=2)
        whole, broken, resumed = Texts(), Texts(), Texts()
        whole.fit(tmp_path / "whole", settings)
        broken.stop_at = stop_at
        with pytest.raises(KeyboardInterrupt):
            broken.fit(tmp_path / "broken", settings)
        resumed.fit(tmp_path / "broken", settings)
        assert torch.equal(resumed.slope, whole.slope)
        assert whole.seen[-len(resumed.seen) :] == resumed.seen
        assert metrics(tmp_path / "broken") == metrics(tmp_path / "whole")

    def test_shuffled_batches_make_such_epochs(self) -> None:
        lengths = [20 + i * 37 % 400 for i in range(3000)]
        counts = {len(shuffled_batches(lengths, 2048, 0, epoch)) for epoch in range(3)}
        assert len(counts) > 1


class TestFigures:
    def test_the_last_step_gives_them(self, tmp_path: Path) -> None:
        line, asked = Line(), []

        def evaluate() -> dict[str, float]:
            asked.append(line.slope.detach().clone())
            return {"slope": float(line.slope[0])}

        settings = replace(SETTINGS, evaluate_every=1000)
        assert self.fit(line, tmp_path, settings, evaluate) == {"slope": float(line.slope[0])}
        assert len(asked) == 1
        # No steps are left, but the figures are still returned.
        line = Line()
        assert self.fit(line, tmp_path, settings, evaluate) == {"slope": float(asked[0][0])}

    def fit(self, line: Line, folder: Path, settings: TrainSettings, evaluate: Any) -> Any:
        return train({"slope": line.slope}, line.loss, line.epochs, settings, folder, evaluate)


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Line().fit(tmp_path)
    with pytest.raises(OptionError, match=r"other settings: learning_rate=0.05 \(now 0.1\); use"):
        Line().fit(tmp_path, replace(SETTINGS, learning_rate=0.1))
    with pytest.raises(OptionError, match="other settings"):
        Line().fit(tmp_path, facts={"examples": 3})


def test_checkpoints_that_do_not_say_what_was_learned_from(tmp_path: Path) -> None:
    """Checkpoints of older versions have no facts; once set, the facts must match."""
    broken = Line()
    broken.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        broken.fit(tmp_path)
    told = {"target": "a", "answers": "0"}
    Line().fit(tmp_path, facts=told)
    for other in ({"target": "b"}, {"answers": "1"}):
        with pytest.raises(OptionError, match="other settings: " + next(iter(other))):
            Line().fit(tmp_path, facts={**told, **other})


def test_another_target_of_the_same_name(tmp_path: Path) -> None:
    Line().fit(tmp_path, facts=target_facts(build("llama")))
    Line().fit(tmp_path, facts=target_facts(copy.deepcopy(build("llama")).bfloat16()))
    with pytest.raises(OptionError, match="settings: other weights of 'LlamaForCausalLM'; use"):
        Line().fit(tmp_path, facts=target_facts(build("llama", seed=1)))


def test_an_unfinished_file_does_not_count(tmp_path: Path) -> None:
    whole = Line().fit(tmp_path / "whole").clone()
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / f"{CHECKPOINT}.part").write_bytes(b"half")
    assert torch.equal(Line().fit(tmp_path / "part"), whole)


@pytest.mark.parametrize("size", [0, 5, 100, -1])
def test_a_checkpoint_that_was_cut_off_is_named(tmp_path: Path, size: int) -> None:
    Line().fit(tmp_path)
    path = tmp_path / CHECKPOINT
    os.truncate(path, size % path.stat().st_size)
    with pytest.raises(OptionError, match=f"{path} is damaged .* delete it to train from"):
        Line().fit(tmp_path)


def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path: Path) -> None:
    save_file({"slope": torch.zeros(2)}, tmp_path / CHECKPOINT)
    with pytest.raises(OptionError, match="is not a checkpoint of a training; delete it"):
        Line().fit(tmp_path)


class TestSteps:
    def test_accumulating_counts_tokens_not_batches(self, tmp_path: Path) -> None:
        """Accumulating batches of 3 and 7 inputs gives the gradient of one batch of 10."""
        slopes = []
        for name, batches in {"cut": [[0, 1, 2], [*range(3, 10)]], "whole": [[*range(10)]]}.items():
            line = Line()
            line.inputs.round_()
            settings = replace(SETTINGS, epochs=1, accumulate=len(batches))
            exact = lambda b, line=line: (  # noqa: E731
                ((line.inputs[b] @ line.slope - line.outputs[b]) ** 2).sum(),
                len(b),
            )
            train({"s": line.slope}, exact, lambda _, b=batches: b, settings, tmp_path / name)
            slopes.append(line.slope.detach())
        torch.testing.assert_close(slopes[0], slopes[1])

    def test_steps_of_many_tokens_and_of_few_weigh_the_same(self, tmp_path: Path) -> None:
        """Each token has the same gradient, so AdamW moves by the learning rate in each step."""
        slope = nn.Parameter(torch.zeros(1))
        settings = replace(SETTINGS, epochs=1, accumulate=1, weight_decay=0.0)
        counts = [1, 10, 1, 10]
        loss = lambda count: ((0.01 * count * slope).sum(), count)  # noqa: E731
        train({"s": slope}, loss, lambda _: counts, settings, tmp_path)
        rates = [settings.rate(step, len(counts)) for step in range(len(counts))]
        torch.testing.assert_close(slope.detach(), -torch.tensor([sum(rates)]))


class TestBatches:
    def test_every_text_once_within_the_limit(self) -> None:
        lengths = [1 + i * 7 % 40 for i in range(100)]
        batches = shuffled_batches(lengths, 120, seed=0, epoch=0)
        assert sorted(index for batch in batches for index in batch) == list(range(100))
        for batch in batches:
            assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 120

    def test_a_seed_and_an_epoch_fix_the_order(self) -> None:
        lengths = [5] * 40
        first = shuffled_batches(lengths, 20, seed=0, epoch=0)
        assert first == shuffled_batches(lengths, 20, seed=0, epoch=0)
        assert first != shuffled_batches(lengths, 20, seed=0, epoch=1)
        assert first != shuffled_batches(lengths, 20, seed=1, epoch=0)

    def test_micro_batches_are_known_by_epoch_and_have_a_seed_each(self) -> None:
        names = [f"text {n}" for n in range(len(LENGTHS))]
        epochs = micro_batches(names, LENGTHS, replace(SETTINGS, batch_tokens=30, seed=3))
        found = [batch for epoch in range(4) for batch in epochs(epoch)]
        assert len({batch.seed for batch in found}) == len(found)
        second = [batch for batch in found if batch.epoch == 1]
        assert sorted(name for batch in second for name in batch.items) == sorted(names)
        assert epochs(1) == second
        done = [batch.done for batch in found]
        assert done == sorted(done)
        assert (done[0], len(set(done))) == (0, len(done))
        assert second[0].done == 1 / SETTINGS.epochs
        assert epochs(0) != second

    def test_a_text_longer_than_the_limit_stands_alone(self) -> None:
        assert sorted(shuffled_batches([50, 2, 3], 10, 0, 0)) == [[0], [1, 2]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("able", [True, False])
def test_float32_models_wait_for_no_emulation(
    dtype: torch.dtype, able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(build("llama")).to(dtype)
    monkeypatch.setattr(trainer, "has_bfloat16", lambda: able)
    states = torch.randn(2, model.config.hidden_size)
    with torch.no_grad(), mixed_precision(model):
        if able or dtype == torch.bfloat16:
            assert model.get_output_embeddings()(states).dtype == torch.bfloat16
        else:
            assert model.get_output_embeddings()(states).dtype == torch.float32


CPU = torch.device("cpu")


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / RUN).read_text())["starts"]


def test_what_a_start_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-spec", "train", "falcon", "--out", "my head"])
    with with_options({"out": Path("my head"), "labels": "hard", "rank": 2}):
        record_start(tmp_path, {"seed": 4}, 0, CPU)
    [start] = starts(tmp_path)
    assert start["command"] == "hf-spec train falcon --out 'my head'"
    assert start["options"] == {"out": "my head", "labels": "hard", "rank": 2}
    assert start["settings"] == {"seed": 4}
    assert start["step"] == 0
    assert start["environment"]["torch"] == torch.__version__
    assert start["packages"]["peft"]
    assert datetime.fromisoformat(start["time"]).tzinfo is not None


def test_outside_a_command_there_are_no_options(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), with_options({"rank": 2}):
        raise RuntimeError
    record_start(tmp_path, {}, 0, CPU)
    assert starts(tmp_path)[0]["options"] is None


def test_a_resumed_training_adds_its_start(tmp_path: Path) -> None:
    broken = Line()
    broken.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        broken.fit(tmp_path)
    [first] = starts(tmp_path)
    Line().fit(tmp_path)
    again = starts(tmp_path)
    assert again[0] == first
    assert [start["step"] for start in again] == [0, SETTINGS.save_every]
    assert first["settings"]["seed"] == SETTINGS.seed
    # Restarting a finished training does nothing and logs nothing.
    Line().fit(tmp_path)
    assert starts(tmp_path) == again
