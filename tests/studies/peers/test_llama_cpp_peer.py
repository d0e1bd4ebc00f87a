"""llama.cpp, if installed: drafting does not change its outputs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from examples.studies.peers import llama_cpp_peer
from examples.studies.peers.peer import started
from hf_spec.common.small_models import SMOLLM2, original_file

PYTHON = os.environ.get("LLAMA_CPP_PYTHON")


@pytest.mark.integration
@pytest.mark.skipif(PYTHON is None, reason="LLAMA_CPP_PYTHON names no interpreter with llama.cpp")
def test_drafts_change_nothing() -> None:
    file: Path = original_file(SMOLLM2)
    ids = torch.tensor([[504, 3575, 282, 4649, 314]])
    answers = {}
    for options in ("", "--lookup", f"--draft {file}"):
        command = f"{PYTHON} -m {llama_cpp_peer.__name__} {file} {options}"
        with started("llama.cpp", command) as peer:
            answers[options] = peer.run(ids, 16).sequence.tolist()
            assert answers[options] == peer.run(ids, 16).sequence.tolist()
    assert len({tuple(answer) for answer in answers.values()}) == 1
    assert len(answers[""]) > ids.shape[1]
