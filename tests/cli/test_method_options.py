"""Options of sampling reach generate(), and none is dropped in silence."""

from __future__ import annotations

import pytest
import typer

from hf_spec.cli.method_options import Sampling


def test_what_generate_is_told() -> None:
    assert Sampling().arguments() == {"do_sample": False}
    assert Sampling(True).arguments() == {"do_sample": True}
    told = Sampling(True, temperature=0.5, top_p=0.9, seed=3).arguments()
    assert told == {"do_sample": True, "temperature": 0.5, "top_p": 0.9}


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"top_p": 0.9}, {"seed": 0}])
def test_useless_without_sample(given: dict[str, float]) -> None:
    with pytest.raises(typer.BadParameter, match="no effect on greedy decoding; add --sample"):
        Sampling(**given)  # type: ignore[arg-type]
