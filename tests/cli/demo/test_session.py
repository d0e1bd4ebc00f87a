"""A whole demo of a tiny model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from rich.console import Console

from hf_spec.bench import suite
from hf_spec.bench.contenders import Contender, Run
from hf_spec.bench.entries import Entry
from hf_spec.bench.settings import Suite
from hf_spec.bench.suite import Benchmark
from hf_spec.cli.demo import session
from hf_spec.cli.demo.entries import chosen_entries
from hf_spec.cli.demo.replay import Recorder
from hf_spec.data.prompts import Prompt
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
