"""Falcon heads by object or folder, and the reason why anything else is rejected."""

from __future__ import annotations

import copy

import pytest

from hf_spec import AssistantError
from hf_spec.methods.falcon.loading import resolve_falcon_head
from tests.published_heads import sample as published
from tests.tiny_models import build


def test_a_head_of_another_strategy() -> None:
    with pytest.raises(AssistantError, match="not an adapter: use spec_strategy='eagle'"):
        resolve_falcon_head(published("eagle").folder, copy.deepcopy(build("llama")))
