"""Fixture: a response of the tiny model, and its draft model's predictions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from examples.studies.disco.oracle_lengths import answers
from hf_spec.common.prompts import Prompt
from hf_spec.methods.disco.training import Observed, observe
from hf_spec.training.responses import Response
from tests.tiny_models import draft_model


@pytest.fixture
def observed_answer(
    model: Any, tokenizer: Any, prompts: list[Prompt], tmp_path: Path
) -> tuple[Response, Observed]:
    """Return a response to the first prompt, and which of its tokens the draft model predicts."""
    (response,) = answers(model, tokenizer, prompts[:1], 24)
    (observed,) = observe(model, draft_model("llama"), [response], tmp_path, "hard")
    return response, observed
