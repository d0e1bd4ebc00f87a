"""Command-line tests of `hf-spec demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from hf_spec.cli.demo import session
from hf_spec.cli.demo.entries import PROMPTS
from hf_spec.evaluation.bench.suite import Benchmark
from tests import tiny_models

ROOT = Path(__file__).parents[3]
# For the real model: few tokens, and one run per contender.
FEW = ("--repeats", "1", "--max-new-tokens", "8")


def refuse_to_load(*arguments: Any) -> Any:
    raise AssertionError("the model was loaded")


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> list[Benchmark]:
    """Record the benchmarks of a tiny model instead of running them."""
    found: list[Benchmark] = []
    monkeypatch.setattr(
        session, "load", lambda *_: (tiny_models.build("llama"), tiny_models.tokenizer())
    )
    monkeypatch.setattr(session, "run", lambda benchmark, *_: found.append(benchmark) or True)
    return found


def test_by_default_all_prompts_and_strategies(benchmarks: list[Benchmark]) -> None:
    result = CliRunner().invoke(build_app(), ["demo"])
    assert result.exit_code == 0, result.output
    [benchmark] = benchmarks
    assert tuple(benchmark.prompts) == PROMPTS
    # The shipped head does not fit the tiny model; the output reports it.
    assert [one.name for one in benchmark.contenders] == ["plain", "none", "lookup", "auto"]
    assert "falcon is left out" in result.output


def test_named_strategies(benchmarks: list[Benchmark]) -> None:
    arguments = ["demo", "--strategy", "tree", "--assistant", "truncated:1", "--repeats", "5"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    [benchmark] = benchmarks
    assert [one.name for one in benchmark.contenders] == ["plain", "none", "tree"]
    assert benchmark.suite.repeats == 5


def test_fails_if_an_output_differs(
    benchmarks: list[Benchmark], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "run", lambda *arguments: False)
    result = CliRunner().invoke(build_app(), ["demo"])
    assert result.exit_code == 1
    assert "differs" in result.output


@pytest.mark.parametrize(("dtype", "status"), [("float32", 1), ("bfloat16", 0)])
def test_another_model(dtype: str, status: int, tmp_path: Path) -> None:
    """Differing outputs fail in float32 only: in half precision they may be due to ties."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    tiny_models.tokenizer().save_pretrained(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "run", lambda *_: False)
        arguments = ["demo", "--model", str(tmp_path), "--dtype", dtype, "--strategy", "lookup"]
        result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == status, result.output
    assert f"loading {tmp_path}" in result.output.replace("\n", "")
    assert ("hf-spec verify" in result.output) == (dtype == "bfloat16")


def test_a_busy_machine_is_told_first(
    benchmarks: list[Benchmark], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("psutil.getloadavg", lambda: (1e6, 0.0, 0.0))
    result = CliRunner().invoke(build_app(), ["demo"])
    assert result.output.startswith("warning: this machine is busy")


@pytest.mark.parametrize("wrong", [("--strategy", "lokup"), ("--repeats", "0")])
def test_mistakes_are_told_before_the_model_is_loaded(
    wrong: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load", refuse_to_load)
    result = CliRunner().invoke(build_app(), ["demo", *wrong])
    assert result.exit_code == 2


@pytest.mark.full
@pytest.mark.real
def test_the_real_model_with_everything(
    smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "load", lambda *_: smollm2)
    monkeypatch.chdir(ROOT)
    result = CliRunner().invoke(build_app(), ["demo", *FEW])
    assert result.exit_code == 0, result.output
    assert result.output.count("4 of 4") == 5
