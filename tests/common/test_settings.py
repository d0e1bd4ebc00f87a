"""Settings classes: help texts, option names and checks derived from their fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import (
    Count,
    Internal,
    Named,
    PositiveShare,
    PositiveWeight,
    Settings,
    Share,
    Weight,
    Within,
    setting_fields,
)
from hf_spec.evaluation.settings import Suite
from hf_spec.methods.sdsat.settings import SdsatTrainSettings
from hf_spec.serving.settings import ServeSettings


@dataclass(frozen=True)
class Search(Settings):
    """How something is searched.

    The class may say more.

    Attributes:
        width: paths that are kept.
        rate, share: two of a kind; the text
            goes on in a second line.
        kind: which.
        sizes: of the beams.

    An afterword.
    """

    width: Annotated[Count | None, Named("paths")] = 4
    rate: Weight = 1.0
    share: Internal[Share] = 0.5
    kind: Literal["wide", "deep"] = "wide"
    other: Literal["a", "b"] | None = None
    sizes: Annotated[tuple[int, ...], Within(1, 9)] = (1, 2)
    seed: int = 0
    exact: bool = True
    name: str = "x"


@dataclass(frozen=True)
class Narrow(Search):
    """A search with more settings.

    Attributes:
        decay: by which later steps weigh less.
        width: fewer paths.
    """

    decay: PositiveShare = 0.5
    scale: PositiveWeight = 1.0
    width: Count = 2


def test_what_is_known_of_a_field() -> None:
    found = {setting.name: setting for setting in setting_fields(Search)}
    assert [setting.option for setting in found.values()] == [
        *("paths", "rate", None, "kind", "other", "sizes", "seed", "exact", "name")
    ]
    assert found["width"].help == "paths that are kept."
    assert found["rate"].help == "two of a kind; the text goes on in a second line."
    assert found["share"].help == found["rate"].help
    assert found["seed"].help == ""
    assert [found[name].kind for name in ("width", "rate", "sizes", "exact")] == [
        *(int, float, int, bool)
    ]
    assert (found["width"].optional, found["width"].repeated) == (True, False)
    assert (found["sizes"].optional, found["sizes"].repeated) == (False, True)
    assert (found["kind"].choices, found["other"].choices) == (("wide", "deep"), ("a", "b"))
    assert (found["share"].bounds, found["seed"].bounds) == (Within(0, 1), None)


def test_inherited_settings_come_last_with_their_texts() -> None:
    found = {setting.name: setting for setting in setting_fields(Narrow)}
    inherited = [setting.name for setting in setting_fields(Search) if setting.name != "width"]
    assert list(found) == ["width", "decay", "scale", *inherited]
    assert (found["width"].help, found["width"].option) == ("fewer paths.", "width")
    assert found["rate"].help == "two of a kind; the text goes on in a second line."


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"decay": 0}, "decay=0 must be a number above 0 and at most 1$"),
        ({"decay": 1.1}, "decay=1.1 must be a number above 0 and at most 1$"),
        ({"scale": 0.0}, "scale=0.0 must be a number above 0$"),
        ({"rate": -1}, "rate=-1 must be a number of at least 0$"),
    ],
)
def test_bounds_that_are_excluded(values: dict[str, Any], message: str) -> None:
    Narrow(decay=1, scale=1e-9)
    with pytest.raises(OptionError, match=message):
        Narrow(**values)


@pytest.mark.parametrize(
    "values",
    [{}, {"width": None}, {"rate": 0}, {"share": 1}, {"other": "b"}, {"sizes": ()}, {"seed": -5}],
)
def test_what_is_taken(values: dict[str, Any]) -> None:
    Search(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"width": 0}, "width=0 must be a whole number of at least 1"),
        ({"width": 1.0}, "width=1.0 must be a whole number of at least 1"),
        ({"width": True}, "width=True must be a whole number of at least 1"),
        ({"rate": None}, "rate=None must be a number of at least 0"),
        ({"rate": float("nan")}, "rate=nan must be a number of at least 0"),
        ({"share": 1.5}, "share=1.5 must be a number between 0 and 1"),
        ({"kind": "flat"}, "kind='flat': choose one of wide, deep"),
        ({"other": []}, r"other=\[\]: choose one of a, b"),
        ({"sizes": (1, 10)}, r"sizes=\(1, 10\) must be a whole number between 1 and 9"),
        ({"seed": "0"}, "seed='0' must be a whole number$"),
        ({"exact": 1}, "exact=1 must be True or False"),
    ],
)
def test_what_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Search(**values)


@dataclass(frozen=True)
class Grouped(Settings):
    """Settings in two groups.

    Attributes:
        depth: how far it goes, e.g. 3. Some prefer more (Li et al. 2025); see there. Default: the
            model's.
        rank: of the matrix. It is small.
        seed: of the draws.
    """

    panel = "Search"
    other_panels: ClassVar = {"Draws": ("seed",)}

    depth: Count | None = None
    rank: Count = 2
    seed: int = 0


def test_a_help_is_short_and_has_its_panel() -> None:
    found = {s.name: (s.panel, s.help) for s in setting_fields(Grouped)}
    assert found == {
        "depth": ("Search", "how far it goes, e.g. 3. Default: the model's."),
        "rank": ("Search", "of the matrix."),
        "seed": ("Draws", "of the draws."),
    }
    assert {setting.panel for setting in setting_fields(Search)} == {"Options"}


@pytest.mark.parametrize(
    "kind",
    [Suite, ServeSettings, SdsatTrainSettings],
)
def test_fields_of_other_panels_exist(kind: type[Settings]) -> None:
    fields = {setting.name for setting in setting_fields(kind)}
    assert {name for names in kind.other_panels.values() for name in names} <= fields
