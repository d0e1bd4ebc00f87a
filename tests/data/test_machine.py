"""What is recorded of the machine."""

from __future__ import annotations

import json

import torch

from hf_spec.data.machine import environment


def test_environment() -> None:
    found = environment()
    assert found == json.loads(json.dumps(found))
    assert found["torch"] == torch.__version__
    assert found["cpu"]
    assert environment(torch.device("cpu"))["device"] == found["cpu"]
    # Without a checkout neither is there.
    assert ("commit" in found) == ("commit_changed" in found)
