"""MTP modules are identified by the names of their tensors alone."""

from __future__ import annotations

import pytest

from hf_spec.methods.mtp.layouts import canonical_names, find_module


@pytest.mark.parametrize(
    ("name", "num_layers", "prefix"),
    [
        ("model.layers.61.eh_proj.weight", 61, "model.layers.61."),
        ("model.layers.4.eh_proj.weight", 4, "model.layers.4."),
        ("model.language_model.layers.46.eh_proj.weight", 46, "model.language_model.layers.46."),
        ("mtp.fc.weight", 3, "mtp."),
        ("model.mtp_layers.0.input_proj.weight", 3, "model.mtp_layers.0."),
        ("mtp_layers.0.input_proj.weight", 3, "mtp_layers.0."),
    ],
)
def test_every_layout(name: str, num_layers: int, prefix: str) -> None:
    found = find_module(["model.norm.weight", name], num_layers)
    assert found is not None
    assert found[1] == prefix


def test_the_first_module_of_several() -> None:
    names = [f"model.layers.{n}.eh_proj.weight" for n in (12, 10, 11)]
    found = find_module(names, 10)
    assert found is not None
    assert found[1] == "model.layers.10."


@pytest.mark.parametrize("name", ["model.layers.3.eh_proj.weight", "fc.weight", "mtp.fc.bias"])
def test_what_is_none(name: str) -> None:
    assert find_module([name], 4) is None


def test_canonical_names_leave_copies_and_other_modules_out() -> None:
    names = [
        "mtp.fc.weight",
        "mtp.norm.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.mlp.gate.weight",
        "mtp.layers.1.mlp.gate.weight",
        "model.norm.weight",
    ]
    found = find_module(names, 4)
    assert found is not None
    assert dict(canonical_names(names, *found)) == {
        "mtp.fc.weight": "projection.weight",
        "mtp.norm.weight": "norm.weight",
        "mtp.pre_fc_norm_hidden.weight": "feature_norm.weight",
        "mtp.layers.0.mlp.gate.weight": "layer.mlp.gate.weight",
    }
    copies = ["embed_tokens.weight", "shared_head.head.weight", "shared_head.norm.weight"]
    names = [f"model.layers.4.{name}" for name in ["eh_proj.weight", *copies]]
    found = find_module(names, 4)
    assert found is not None
    assert set(canonical_names(names, *found).values()) == {"projection.weight", "norm.weight"}
