"""Compared strategies, in and outside a checkout, and answers to the demo's prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hf_spec.cli.demo import entries
from hf_spec.cli.demo.entries import (
    HEAD,
    PROMPTS,
    default_entries,
    find_head,
)
from hf_spec.cli.demo.session import copied_share
from tests import tiny_models

ROOT = Path(__file__).parents[3]

# Parts of a correct answer, and the range of its share of tokens copied from the prompt.
RIGHT = {
    "summary": (("1860s", "boneshaker", "Dunlop", "rubber tyre filled with air"), (0.8, 0.9)),
    "translation": (("```javascript\nfunction add(a, b) {\n    return a + b;\n}",), (0.6, 0.75)),
    "code": (("def is_palindrome(text):\n    return text == text[::-1]\n",), (0.0, 0.15)),
    "fact": (("energy from the sun", "light energy", "chemical energy"), (0.0, 0.0)),
}


def names(found: list[Any]) -> list[str]:
    return [name for name, _, _ in found]


def test_the_head_is_found_in_a_checkout_alone(tmp_path: Path) -> None:
    assert find_head([tmp_path, ROOT]) == ROOT / HEAD
    assert find_head([tmp_path]) is None


def test_the_folder_of_the_command_may_be_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "CHECKOUT", Path("/nowhere"))
    monkeypatch.chdir(ROOT)
    assert find_head() == ROOT / HEAD
    monkeypatch.chdir("/")
    assert find_head() is None


def test_without_the_head_the_reader_is_told() -> None:
    found, missing = default_entries(tiny_models.build("llama"), None)
    assert names(found) == ["none", "lookup", "auto"]
    assert str(HEAD) in missing
    assert "--strategy falcon@FOLDER" in missing


def test_a_head_of_another_model_is_left_out_and_named() -> None:
    found, missing = default_entries(tiny_models.build("llama"), ROOT / HEAD)
    assert names(found) == ["none", "lookup", "auto"]
    assert "hidden_size" in missing


@pytest.mark.real
def test_the_head_serves_falcon_and_auto(smollm2: tuple[Any, Any]) -> None:
    found, missing = default_entries(smollm2[0], ROOT / HEAD)
    assert missing == ""
    assert names(found) == ["none", "lookup", "falcon", "auto"]
    assert [assistant for *_, assistant in found] == [None, None, *[str(ROOT / HEAD)] * 2]


@pytest.mark.full
@pytest.mark.real
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
def test_the_model_answers_well_and_ends(prompt: Any, smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    ids = prompt.encode(tokenizer)
    output = model.generate(ids, do_sample=False, max_new_tokens=128)[0, ids.shape[1] :].tolist()
    text = tokenizer.decode(output, skip_special_tokens=True)
    parts, (least, most) = RIGHT[prompt.id]
    assert output[-1] == tokenizer.eos_token_id
    assert [part for part in parts if part not in text] == []
    assert least <= copied_share(ids[0].tolist(), output) <= most
    # No loops: any eight consecutive tokens occur at most twice.
    runs = Counter(zip(*(output[start:] for start in range(8)), strict=False))
    assert max(runs.values()) <= 2
