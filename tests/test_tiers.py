"""Selection of the cases of a parametrized test that run by default."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.test_identity import no_padding, stop_string
from tests.tiers import runs_by_default


def case(*markers: dict[str, Any], **parameters: Any) -> Any:
    """Return a collected test with these parameters and `by_default` markers."""
    marks = [pytest.mark.by_default(**selected).mark for selected in markers]
    return SimpleNamespace(
        nodeid="test_one[case]",
        callspec=SimpleNamespace(params=parameters),
        iter_markers=lambda name: marks if name == "by_default" else [],
    )


def test_without_a_marker_all_run() -> None:
    assert runs_by_default(case())


def test_values_names_and_ids_select() -> None:
    selected = {"name": ("llama", 3), "option": ("stop_string",), "prompt": ("code-0",)}
    prompt = SimpleNamespace(id="code-0")
    assert runs_by_default(case(selected, name="llama", option=stop_string, prompt=prompt))
    assert runs_by_default(case(selected, name=3, option=stop_string, prompt=prompt))
    for other in ({"name": "bloom"}, {"option": no_padding}, {"prompt": SimpleNamespace(id="x")}):
        given = {"name": "llama", "option": stop_string, "prompt": prompt, **other}
        assert not runs_by_default(case(selected, **given))


def test_a_function_decides_on_other_values() -> None:
    even = {"size": lambda size: size % 2 == 0}
    assert runs_by_default(case(even, size=4))
    assert not runs_by_default(case(even, size=3))


def test_all_markers_count() -> None:
    markers = {"name": ("llama",)}, {"size": (1, 2)}
    assert runs_by_default(case(*markers, name="llama", size=2))
    assert not runs_by_default(case(*markers, name="llama", size=3))


def test_other_tools_run_in_the_full_tier() -> None:
    integration = [pytest.mark.integration.mark]
    item = SimpleNamespace(iter_markers=lambda name: integration if name == "integration" else [])
    assert not runs_by_default(item)


def test_a_parameter_that_is_missing_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_one\[case\].*no parameter 'nam'"):
        runs_by_default(case({"nam": ("llama",)}, name="llama"))


@pytest.mark.by_default(number=(1,))
@pytest.mark.parametrize("number", [1, 2])
def test_the_others_are_marked(number: int, request: pytest.FixtureRequest) -> None:
    assert (request.node.get_closest_marker("full") is None) == (number == 1)
