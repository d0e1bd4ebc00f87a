"""A complete demo of a tiny model, and tables and warnings for made-up records."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_spec.cli.demo import session, watch
from hf_spec.cli.demo.replay import Recorder
from hf_spec.cli.demo.session import conclusion, copied_share, strategies_table
from hf_spec.cli.options import Placement
from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.common.prompts import Prompt
from hf_spec.common.tables import Table
from hf_spec.evaluation.bench import suite
from hf_spec.evaluation.bench.contenders import Contender, Run
from hf_spec.evaluation.bench.runner import Record, Row
from hf_spec.evaluation.bench.suite import Benchmark
from hf_spec.evaluation.settings import Suite
from hf_spec.methods.entries import Entry, parse_entries, with_baseline
from tests import tiny_models

TEXTS = {"one": "bababa", "two": "cacaca"}
ENTRIES = with_baseline(parse_entries(["lookup", "auto"]))


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
    return session.run(benchmark, recorder, console, "tiny-llama")


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
    assert "6 tokens (cut)" in page(shown)
    assert page(shown).count(" forward passes, identical; ") == 2


def test_it_ends_with_one_table_and_one_sentence() -> None:
    shown = console()
    run(shown)
    lines = page(shown).rstrip().splitlines()
    table = lines[max(n for n, line in enumerate(lines) if line.startswith("all prompts")) :]
    assert max(map(len, table)) <= 80
    assert sum("───" in line for line in table) == 1
    start = next(n for n, line in enumerate(table) if line.startswith("Drafting "))
    sentence = " ".join(" ".join(table[start:]).split())
    assert sentence.count("none, the engine without drafting") == 1
    assert re.search(r"\.$", sentence)
    assert not re.search(r"\. [A-Z]", sentence)


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
    monkeypatch.setattr(watch.CpuWatch, "share_of_others", lambda watch: 0.42)
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
    """Return records of a prompt that every strategy speeds up and one that none does."""
    easy = [record("easy", name, seconds) for name, seconds in SECONDS.items()]
    return [*easy, *(record("hard", name, 8.0) for name in SECONDS)]


def lines(table: Table) -> dict[str, list[str]]:
    """Return the rows of a table, printed 80 columns wide: first cell -> the other words."""
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


def test_the_sentence_names_what_drafting_added(records: list[Record]) -> None:
    easy = [record for record in records if record.prompt == "easy"]
    assert conclusion(easy[:3]) == (
        "Drafting with lookup added 100%: 2.00x the speed of none, the engine without drafting."
    )
    assert conclusion(records).startswith("Drafting with auto added")
    assert conclusion([record for record in records if record.prompt == "hard"]) == (
        "Drafting added nothing here: lookup, the fastest, has 1.00x the speed of none, the engine "
        "without drafting."
    )
    assert "Add --strategy" in conclusion(easy[:2])


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


def test_unsteady_runs_are_told() -> None:
    """The warning has the factor of the worst prompt, for plain `generate()` only."""
    records = [plain("a", 2.0), plain("a", 3.0), plain("b", 9.0), plain("b", 9.0)]
    records += [plain("a", 99.0, "lookup")]
    assert "factor of 1.50" in session.unsteady_warning(records)
    assert session.unsteady_warning([*records[:1], *records[2:]]) == ""


@pytest.mark.parametrize(
    ("name", "dtype", "loaded"),
    [(None, "auto", "float32"), (None, "bfloat16", "bfloat16"), ("mine", "auto", "auto")],
)
def test_the_small_model_is_float32(
    name: str | None, dtype: str, loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default dtype of the small model is float32, which gives identical outputs."""
    placements: list[Placement] = []
    monkeypatch.setattr(session, "smollm2_135m_instruct", lambda: Path("small"))
    monkeypatch.setattr(session, "load_tokenizer", lambda name: name)
    monkeypatch.setattr(session, "load_target", lambda _, placement: placements.append(placement))
    assert session.load(name, Placement(dtype))[1] == (name or "small")
    assert [placement.dtype for placement in placements] == [loaded]
