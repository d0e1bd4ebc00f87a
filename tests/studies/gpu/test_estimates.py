"""GPU estimates: bytes of published sizes, counted launches, and the fit to measured rows."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import transformers

from examples.studies.gpu import estimates
from examples.studies.gpu.estimates import DRAFTS, MODELS, Counts, Host, Machine, Step
from examples.studies.gpu.tables import ESTIMATES, RUNS, load
from tests.compiler import needs_compiler


@pytest.fixture(scope="module")
def record() -> dict[str, Any]:
    return load(ESTIMATES)


@pytest.mark.parametrize(
    ("name", "billions"),
    # Parameters of the model cards, without an embedding that is not also the LM head.
    [("Llama-3.1-8B", 8.03 - 0.525), ("Qwen3-4B", 4.02), ("SmolLM2-135M", 0.1345)],
)
def test_a_step_reads_the_weights(name: str, billions: float) -> None:
    assert estimates.weight_bytes(name) == pytest.approx(2e9 * billions, rel=0.005)


def test_windows_bound_the_keys_that_are_read() -> None:
    assert estimates.kv_bytes("Llama-3.1-8B", 1000) == 32 * 8 * 128 * 2 * 2 * 1000
    per_token = 2 * 2 * 4 * 256
    # Every sixth of the 34 layers attends to all tokens.
    assert estimates.kv_bytes("Gemma-3-4B", 8192) == per_token * (5 * 8192 + 29 * 1024)


def test_a_token_takes_its_bytes_its_kernels_and_the_host() -> None:
    machine = Machine(1e9, 2.0, {"fused": 0.5, "uncompiled": 1.0}, {"run": Host(10, 1, 0.5, 0.25)})
    step, draft = Step(4e9, 1000, 800, 400), Step(1e9, 100, 80, 50)
    assert machine.plain(step, "run") == 10
    assert machine.plain(Step(40e9, 1000, 800, 400), "run") == 40
    assert machine.none(step, "run", False) == pytest.approx(4 + 1.6 + 1)
    assert machine.none(step, "run", True) == pytest.approx(4 + 0.4 + 1)
    assert machine.lookup(step, "run", True, 1.0) == pytest.approx((5.4 + 0.5) / 2)
    token = 1 + 0.05 + 0.25
    assert machine.draft(step, draft, "run", True, 2.0) == pytest.approx((5.4 + 5 * token) / 3)


def test_the_record_is_that_of_the_formulas(record: dict[str, Any]) -> None:
    counts = {kind: Counts(**one) for kind, one in record["counts"].items()}
    machine = estimates.fitted(counts)
    assert asdict(machine).keys() == record["machine"].keys()
    assert machine.kernel_us == pytest.approx(record["machine"]["kernel_us"], rel=1e-3)
    for run, one in machine.hosts.items():
        assert asdict(one) == pytest.approx(record["machine"]["hosts"][run], rel=1e-3)
    assert [one["model"] for one in record["estimates"]] == [name for name in DRAFTS for _ in "12"]
    for one in estimates.compared(machine, counts):
        assert one["estimated"] == pytest.approx(one["measured"], rel=0.25)
    assert {one["run"] for one in record["compared"]} == set(RUNS)


def test_eager_launches_are_those_of_the_record(record: dict[str, Any]) -> None:
    one = record["counts"]["Llama"]
    found = estimates.eager_launches(estimates.tiny("Llama-3.1-8B", 2))
    assert found == one["eager_rest"] + 2 * one["eager_layer"]


@pytest.mark.full
@needs_compiler
@pytest.mark.parametrize("kind", sorted({kind for kind, *_ in MODELS.values()}))
def test_counts_are_those_of_the_record(kind: str, record: dict[str, Any]) -> None:
    found = asdict(estimates.counts_of(kind))
    if record["environment"]["transformers"] == transformers.__version__:
        assert found == record["counts"][kind]
