"""lm-eval study: its tasks run in the harness, and a stored strategy changes no response."""

from __future__ import annotations

import copy
import json
import operator
import re
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs the extra 'evaluation'")

from examples.studies.integrations.lm_eval_speed import (
    FUNCTIONS,
    SUMS,
    evaluate,
    items_of,
    passes,
    table,
    task,
)
from hf_spec import SpecStats, collect_stats
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build

pytestmark = pytest.mark.integration


@pytest.mark.parametrize(("batch_size", "name"), [(1, SUMS), (8, SUMS), (2, FUNCTIONS)])
def test_a_stored_strategy_leaves_answers_and_score(batch_size: int, name: str) -> None:
    asked = task(name)
    model, tokenizer = copy.deepcopy(build("llama")), make_tokenizer(None)
    with collect_stats() as stats:
        plain = evaluate(model, tokenizer, None, batch_size, 3, asked)
        assert not stats
        stored = evaluate(model, tokenizer, "lookup", batch_size, 3, asked)
    assert (stored.score, stored.answers) == (plain.score, plain.answers)
    assert len(set(plain.answers)) > 1
    assert sum(stats, SpecStats([])).accepted_tokens > 0
    assert model.generation_config.spec_strategy is None


def test_the_items_are_right() -> None:
    items = [json.loads(line) for line in items_of(SUMS).read_text("utf-8").splitlines()]
    assert len({item["question"] for item in items}) == 20
    calculate = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
    for item in items:
        sums = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)", item["reasoning"])
        assert all(calculate[sign](int(a), int(b)) == int(result) for a, sign, b, result in sums)
        assert sums[-1][-1] == item["answer"]


ANSWERS = {
    "clamp": "    return max(low, min(value, high))\n",
    "gcd": "    while b:\n        a, b = b, a % b\n    return a\n",
    "binary": "    return format(number, 'b')\n",
    "is_leap_year": "    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
}


def test_functions_are_run() -> None:
    items = [json.loads(line) for line in items_of(FUNCTIONS).read_text("utf-8").splitlines()]
    named = {item["prompt"].partition("(")[0].removeprefix("def "): item for item in items}
    assert len(named) == 20
    for name, item in named.items():
        assert all(name in test for test in item["tests"])
        assert not passes(item, "    return None\n")
    assert all(passes(named[name], text) for name, text in ANSWERS.items())
    assert not passes(named["gcd"], "    return a +\n")


def test_times_are_ratios_to_plain() -> None:
    def run(strategy: str, seconds: float, answer: str) -> dict[str, Any]:
        found = {"score": 0.5, "seconds": seconds, "answers": [answer]}
        return {"batch": 1, "strategy": strategy, **found}

    runs = [run("plain", 2.0, "a"), run("x", 1.0, "a"), run("plain", 3.0, "a"), run("x", 2.0, "b")]
    plain, other = table(runs)
    assert (plain["speed"], plain["same_answers"]) == (1.0, "2 of 2")
    assert (other["speed"], other["least"], other["most"]) == (1.75, 1.5, 2.0)
    assert other["same_answers"] == "1 of 2"
