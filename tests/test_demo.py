"""The demo's arithmetic on made-up runs, and one short demo with the real model."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from hf_spec import demo
from hf_spec.cli.app import build_app
from hf_spec.demo import Comparison, Run, Subject

DRAFT = Path(__file__).parents[1] / "examples" / "adapters" / "smollm2-135m-draft"


def speculative(token_ids: list[int], seconds: float) -> Run:
    stats = SimpleNamespace(target_forwards=2, accepted_tokens=3, tau=1.5)
    return Run(token_ids, seconds, stats)


def printed(comparisons: list[Comparison]) -> str:
    page = io.StringIO()
    Console(file=page, width=80).print(demo.results_table(comparisons, "lookup"))
    return page.getvalue()


def test_ratio_compares_neighbouring_runs() -> None:
    comparison = Comparison(
        "code",
        plain=[Run([1, 2], 4.0), Run([1, 2], 2.0)],
        speculative=[speculative([1, 2], 1.0), speculative([1, 2], 1.0)],
    )
    assert comparison.ratios == [4.0, 2.0]
    assert comparison.identical


def test_one_different_repeat_is_noticed() -> None:
    comparison = Comparison(
        "code",
        plain=[Run([1, 2], 1.0)] * 2,
        speculative=[speculative([1, 2], 1.0), speculative([1, 3], 1.0)],
    )
    assert not comparison.identical
    assert "NO" in printed([comparison])


def test_table_fits_eighty_columns_and_pools_all_prompts() -> None:
    comparisons = [
        Comparison(name, [Run([1] * 128, 8.0)] * 3, [speculative([1] * 128, seconds)] * 3)
        for name, seconds in (("code", 1.0), ("summary", 7.0))
    ]
    page = printed(comparisons)
    assert "…" not in page
    last_row = page.strip().splitlines()[-1].split()
    assert last_row[:2] == ["all", "256"]
    assert "2.00" in last_row
    assert last_row[-1] == "yes"


def test_runs_alternate_and_each_kind_goes_first_in_turn() -> None:
    calls = []

    class Model:
        device = torch.device("cpu")

        def generate(self, input_ids: torch.Tensor, **arguments: Any) -> Any:
            calls.append("spec_strategy" in arguments)
            new_tokens = torch.tensor([[7, 8]])
            return SimpleNamespace(sequences=torch.cat([input_ids, new_tokens], dim=1))

    subject = Subject(Model(), None, {"spec_strategy": "lookup"}, max_new_tokens=2)
    inputs = {"input_ids": torch.tensor([[1, 2, 3]])}
    comparison = demo.measure(subject, "code", inputs, repeats=2)
    assert calls == [False, True, True, False]
    assert [run.token_ids for run in comparison.plain + comparison.speculative] == [[7, 8]] * 4


def test_demo_fails_if_an_output_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    different = Comparison("code", [Run([1], 1.0)], [speculative([2], 1.0)])
    model = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    monkeypatch.setattr(demo, "_load_model", lambda: (model, None))
    monkeypatch.setattr(demo, "compare", lambda *arguments: iter([different]))
    result = CliRunner().invoke(build_app(), ["demo"])
    assert result.exit_code == 1
    assert "differs" in result.output


@pytest.mark.real
@pytest.mark.parametrize("strategy", [(), ("--strategy", "tree", "--assistant", str(DRAFT))])
def test_demo_with_the_real_model(
    strategy: tuple[str, ...], smollm2: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_load_model", lambda: smollm2)
    arguments = ["demo", *strategy, "--repeats", "1", "--max-new-tokens", "12"]
    result = CliRunner().invoke(build_app(), arguments)
    assert result.exit_code == 0, result.output
    # One row for each prompt and one for all of them.
    assert sum(line.rstrip().endswith("yes") for line in result.output.splitlines()) == 4
