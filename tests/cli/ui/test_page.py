"""The page without a browser; tests/integrations/test_ui.py uses a real browser."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from hf_spec.cli.options import UiSettings
from hf_spec.cli.ui.comparison import Comparer
from hf_spec.common.errors import OptionError
from tests.cli.ui.conftest import LOOKUP, PROMPT

pytest.importorskip("gradio", reason="needs the extra 'ui'")

from hf_spec.cli.ui.page import build_page, serve_page

SETTINGS = UiSettings(max_new_tokens=24)


@pytest.fixture(scope="module")
def page(comparer: Comparer) -> Any:
    return build_page(comparer, "tiny <llama>", SETTINGS)


def function(page: Any, name: str) -> Any:
    [found] = [one.fn for one in page.fns.values() if one.name == name]
    return found


def test_the_choices_are_those_of_the_comparer(page: Any) -> None:
    parts = [one["props"] for one in page.get_config_file()["components"]]
    [choice] = [one for one in parts if one.get("label") == "Strategy"]
    assert [name for name, _ in choice["choices"]] == [LOOKUP, "none"]
    assert choice["value"] == LOOKUP
    [longest] = [one for one in parts if one.get("label") == "Maximum new tokens"]
    assert longest["maximum"] == 24
    assert not page.analytics_enabled


def shown(parts: dict[Any, Any]) -> dict[str, Any]:
    return {part.elem_id or "kept": value for part, value in parts.items()}


def test_an_answer_comes_after_what_was_there_is_gone(page: Any) -> None:
    before, after = map(shown, function(page, "compare")(PROMPT, LOOKUP, 24))
    assert [before[name].visible for name in ("figures", "round", "picture")] == [False] * 3
    assert f"then {LOOKUP}" in before["answers"]
    found = after["kept"]
    assert (after["round"].maximum, after["round"].value) == (len(found.rounds), found.fullest + 1)
    assert str(found.picture(found.fullest)) in after["picture"].value


def test_what_cannot_be_answered_is_said_in_its_place(page: Any) -> None:
    _, after = map(shown, function(page, "compare")(" ", LOOKUP, 24))
    assert after.keys() == {"answers"}
    assert "the prompt is empty" in after["answers"]


def test_a_port_that_is_taken(page: Any) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(OptionError, match=f"cannot listen on --host .* --port {port}"):
            serve_page(page, UiSettings(port=port))
