"""What trained parts are built from: the choices that help lists are those that are served."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.methods.falcon.shapes import FEATURES, MODES, TOP, FalconShape, default_aux_layers
from hf_spec.training.settings import SdsatTrainSettings


@pytest.mark.parametrize("mode", MODES)
def test_each_can_be_trained(mode: str) -> None:
    tokens = (96,) if mode == "full" else ()
    assert SdsatTrainSettings(mode=mode, token_ids=tokens).mode == mode


def test_another_is_answered_with_all() -> None:
    with pytest.raises(OptionError, match=", ".join(MODES)):
        SdsatTrainSettings(mode="half")


def test_features_cover_what_the_classifier_sees() -> None:
    places = list(range(TOP + 2))
    assert [place for group in FEATURES.values() for place in places[group]] == places


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 5}, "block_size=5 must be a whole number between 1 and 4"),
        ({"block_size": True}, "block_size=True must be a whole number"),
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1"),
        ({"recurrent": 1}, "recurrent=1 must be True or False"),
        ({"dropout": 1.0}, "dropout=1.0 must be below 1"),
        ({"dropout": "0"}, "dropout='0' must be a number between 0 and 1"),
    ],
)
def test_a_head_that_cannot_be_built(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FalconShape(**wrong)


def test_default_layers() -> None:
    assert default_aux_layers(32) == (2, 16, 29)
