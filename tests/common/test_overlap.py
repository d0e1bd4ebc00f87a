"""Trainings do without what benchmarks report on."""

from __future__ import annotations

from hf_spec.common.overlap import RUN, apart_from_reported
from hf_spec.common.prompts import Prompt, load_prompts


def ids(*texts: str) -> list[str]:
    prompts = [Prompt(str(place), "qa", (text,)) for place, text in enumerate(texts)]
    return [prompt.id for prompt in apart_from_reported(prompts)]


def test_none_of_the_package_is_left() -> None:
    assert apart_from_reported(load_prompts()) == []


def test_a_run_of_words_is_enough() -> None:
    long = max((turn for prompt in load_prompts() for turn in prompt.turns), key=len)
    words = long.split()
    middle = words[40 : 40 + 2 * RUN]
    assert ids(f"Once upon a time: {' '.join(middle).upper()}! And so on.", "another one") == ["1"]
    # Fewer words in a row are found anywhere.
    assert ids(" ".join(words[40:46])) == ["0"]


def test_short_prompts_count_whole() -> None:
    def length(text: str) -> int:
        return len(text.split())

    short = min((prompt.turns[0] for prompt in load_prompts()), key=length)
    assert length(short) < RUN
    assert ids(short.lower(), f"{short} Or not?", "...") == ["1", "2"]
