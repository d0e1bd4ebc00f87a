"""The table of published heads."""

from __future__ import annotations

import copy

import hf_spec.models.methods  # noqa: F401 - the families become known
from hf_spec import heads_for
from hf_spec.adapters.base_name import is_hub_id
from hf_spec.adapters.known_heads import KnownHead, _table
from hf_spec.adapters.published import family_record
from tests.tiny_models import build


def test_a_model_and_its_name() -> None:
    model = copy.copy(build("llama"))
    model.config = copy.copy(model.config)
    model.config.name_or_path = "Qwen/Qwen3-8B"
    found = heads_for(model)
    assert found == heads_for("Qwen/Qwen3-8B")
    assert KnownHead("RedHatAI/Qwen3-8B-speculator.peagle", "peagle") in found
    assert heads_for(build("llama")) == []


def test_every_head_can_be_used() -> None:
    for target, heads in _table().items():
        assert is_hub_id(target)
        assert len({head.repo for head in heads}) == len(heads) > 0
        for head in heads:
            assert is_hub_id(head.repo)
            assert family_record(head.family, head.repo).strategy == "eagle"
