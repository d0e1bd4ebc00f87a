"""A whole demo of a tiny model, and its tables and warnings from records that are made up."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from hf_spec.cli.demo import session
from hf_spec.cli.demo.entries import chosen_entries
from hf_spec.cli.demo.replay import Recorder
from hf_spec.cli.demo.session import Answer, copied_share, prompts_table, strategies_table
from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench import suite
from hf_spec.evaluation.bench.contenders import Contender, Run
from hf_spec.evaluation.bench.entries import Entry
from hf_spec.evaluation.bench.runner import Record, Row
from hf_spec.evaluation.bench.suite import Benchmark
from hf_spec.evaluation.bench.tables import Table
from hf_spec.evaluation.settings import Suite
from tests import tiny_models

TEXTS = {"one": "bababa", "two": "cacaca"}
ENTRIES = chosen_entries(["lookup", "auto"], [])


def run(console: Console, entries: Sequence[Entry] | None = None) -> bool:
    recorder = Recorder()
    benchmark = Benchmark(
        tiny_models.build("llama"),
        tiny_models.tokenizer(),
        [Prompt(name, name, (text,)) for name, text in TEXTS.items()],
        ENTRIES if entries is None else entries,
        Suite(new_tokens=6, repeats=2, baselines=False),
        streamer=recorder,
    )
    return session.run(benchmark, recorder, console)


def console(terminal: bool = False) -> Console:
    return Console(file=io.StringIO(), width=80, force_terminal=terminal)


def page(shown: Console) -> str:
    return shown.file.getvalue()  # type: ignore[attr-defined]


def test_texts_times_and_tables_in_a_pipe() -> None:
    shown = console()
    assert run(shown)
    tokenizer = tiny_models.tokenizer()
    ids = Prompt("one", "one", (TEXTS["one"],)).encode(tokenizer)
    plain = tiny_models.build("llama").generate(ids, do_sample=False, max_new_tokens=6)
    text = tokenizer.decode(plain[0, ids.shape[1] :], skip_special_tokens=True)
    assert text in page(shown).splitlines()
    assert page(shown).count("[plain ") == 2
    assert page(shown).count("2 of 2") == 4
    assert "6, cut" in page(shown)


def test_a_pipe_gets_no_bars_and_no_escapes(capfd: pytest.CaptureFixture[str]) -> None:
    shown = console()
    run(shown)
    assert "\r" not in page(shown)
    assert "\x1b" not in page(shown)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_two_panels() -> None:
    shown = console(terminal=True)
    run(shown)
    assert "╭" in page(shown)
    assert "replayed" in page(shown)
    assert "16/16" in page(shown)


def test_a_different_output_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    make = suite.make_contenders

    def one_of_them_wrong(*arguments: Any) -> list[Contender]:
        *right, last = make(*arguments)

        def run(ids: torch.Tensor, new_tokens: int, mask: torch.Tensor | None = None) -> Run:
            found = last.run(ids, new_tokens, mask)
            found.sequences[0, -1] += 1
            return found

        return [*right, replace(last, run=run)]

    monkeypatch.setattr(suite, "make_contenders", one_of_them_wrong)
    shown = console()
    assert not run(shown)
    assert "0 of 2" in page(shown)


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session.CpuWatch, "share_of_others", lambda watch: 0.42)
    shown = console()
    run(shown)
    assert "42%" in page(shown)


def test_bad_strategies_are_refused_before_anything_is_timed() -> None:
    with pytest.raises(ValueError, match="2 times"):
        run(console(), [*ENTRIES, ENTRIES[-1]])


SECONDS = {"plain": 8.0, "none": 4.0, "lookup": 2.0, "falcon": 2.0, "auto": 1.0}


def record(prompt: str, contender: str, seconds: float, plain_seconds: float = 8.0) -> Record:
    counts = RowStats(4, 10, 6, 10, [4], [4])
    stats = SpecStats([counts], verify_seconds=seconds)
    rows = (Row(prompt, prompt, True),)
    own = None if contender == "plain" else stats
    return Record(prompt, prompt, contender, 0, seconds, plain_seconds, 100, 40, True, own, 1, rows)


@pytest.fixture
def records() -> list[Record]:
    """A prompt on which everything helps, and one on which nothing does."""
    easy = [record("easy", name, seconds) for name, seconds in SECONDS.items()]
    return [*easy, *(record("hard", name, 8.0) for name in SECONDS)]


def lines(table: Table) -> dict[str, list[str]]:
    """First cell -> the others, as a pipe of 80 columns has them."""
    page = io.StringIO()
    Console(file=page, width=80).print(table.drawn())
    assert "…" not in page.getvalue()
    return {
        line.split()[0]: line.split()[1:] for line in page.getvalue().splitlines() if line.strip()
    }


def test_one_row_a_strategy(records: list[Record]) -> None:
    found = lines(strategies_table(records))
    ratios = ["1.00", "(1.00", "-", "1.00)", "0.75", "1.00"]
    assert found["plain"] == [*ratios, "-", "2.50", "2", "of", "2"]
    assert found["none"][:6] == ["1.50", "(1.20", "-", "1.80)", "1.00", "1.33"]
    assert found["auto"][4:7] == ["2.50", "1.78", "1.50"]


def test_without_the_engine_alone_there_is_nothing_to_compare_with(records: list[Record]) -> None:
    found = lines(strategies_table([r for r in records if r.contender in ("plain", "lookup")]))
    assert found["lookup"][4] == "-"


def test_one_row_a_prompt(records: list[Record]) -> None:
    answers = {"easy": Answer(100, 0.853, True), "hard": Answer(128, 0.0, False)}
    found = lines(prompts_table(records, answers))
    assert found["easy"] == ["100", "85%", "2.00", "4.00", "4.00", "8.00"]
    assert found["hard"] == ["128,", "cut", "0%", "1.00", "1.00", "1.00", "1.00"]


def test_one_different_output_is_seen(records: list[Record]) -> None:
    one = replace(records[3], identical=False, rows=(Row("easy", "easy", False),))
    wrong = [*records[:3], one, *records[4:]]
    assert "1 of 2" in " ".join(lines(strategies_table(wrong))["falcon"])


@pytest.mark.parametrize(
    ("prompt", "output", "share"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [9, 2, 3, 4, 9, 9], 0.5),
        ([1, 2, 3, 4, 5], [1, 2, 3, 9, 3, 4, 5, 9], 0.75),
        ([1, 2, 3, 4], [1, 2, 9, 3, 4], 0.0),
        ([1, 2], [1, 2], 0.0),
        ([1, 2, 3], [], 0.0),
    ],
)
def test_copied_tokens_stand_in_runs_of_three(
    prompt: list[int], output: list[int], share: float
) -> None:
    assert copied_share(prompt, output) == share


def test_a_token_of_two_runs_counts_once() -> None:
    assert copied_share([1, 2, 3, 4], [1, 2, 3, 4, 8, 9, 8, 9]) == 0.5


def plain(prompt: str, seconds: float, contender: str = "plain") -> Record:
    return Record(prompt, prompt, contender, 0, seconds, seconds, 10, 10, True)


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    # Percent of all processors, and of one of the four.
    [(50.0, 200.0, 0.0), (75.0, 200.0, 0.25), (100.0, 0.0, 1.0), (47.5, 200.0, 0.0)],
)
def test_own_work_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: busy)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda process: own)
    assert session.CpuWatch().share_of_others() == pytest.approx(share)


def test_the_counters_of_this_machine_are_read() -> None:
    watch = session.CpuWatch()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    own, busy = watch._own.cpu_percent(), psutil.cpu_percent()
    assert own > 20
    assert busy > 0.5 * own / psutil.cpu_count()


def test_disagreement_is_that_of_the_worst_prompt() -> None:
    records = [plain("a", 2.0), plain("a", 3.0), plain("b", 9.0), plain("b", 9.0)]
    records += [plain("a", 99.0, "lookup")]
    assert session.slowest_to_fastest(records, "plain") == 1.5
    assert session.slowest_to_fastest(records[:1], "plain") == 1.0


def test_warnings_name_the_figure() -> None:
    assert session.warnings(0.05, 1.1) == []
    [busy] = session.warnings(0.42, 1.1)
    assert "42%" in busy
    [unsteady] = session.warnings(0.0, 1.5)
    assert "1.50" in unsteady
    assert len(session.warnings(0.42, 1.5)) == 2
