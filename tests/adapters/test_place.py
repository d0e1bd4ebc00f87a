"""What a name on the Hub stands for."""

from __future__ import annotations

import pytest

from hf_spec import AssistantError
from hf_spec.adapters.place import Place


def test_a_place() -> None:
    assert Place.of("org/a") == Place("org/a")
    assert Place.of("org/a@v1", token="t") == Place("org/a", "v1", "t")
    assert Place.of("org/a", "v1") == Place("org/a", "v1")


def test_two_revisions() -> None:
    with pytest.raises(AssistantError, match="names a revision, and revision='v2' another one"):
        Place.of("org/a@v1", "v2")


@pytest.mark.parametrize("name", ["", "a/b/c", "..", "org/", "org/na me"])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(AssistantError, match="cannot be pushed to"):
        Place(name).check()
