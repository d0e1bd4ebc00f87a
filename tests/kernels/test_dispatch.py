"""Choice of the implementation, and an import that needs neither Triton nor a GPU."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_spec_kernels import build, dispatch, serves, using
from hf_spec_kernels.dispatch import check_tensor

ROOT = Path(__file__).parents[2]

IMPORT = """
import sys
{prepare}
import hf_spec_kernels
import torch
others = {{name.partition(".")[0] for name in sys.modules}}
probs = torch.tensor([[0.5, 0.25, 0.25]])
features = hf_spec_kernels.draft_features(probs, 2)
assert torch.equal(features[:, :2], probs[:, :2])
print(hf_spec_kernels.has_triton(), "triton" in sys.modules, "transformers" in others)
"""


def run(prepare: str = "") -> str:
    finished = subprocess.run(
        [sys.executable, "-c", IMPORT.format(prepare=prepare)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "kernels")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_importing_and_the_references_leave_triton_alone() -> None:
    assert run() == f"{dispatch.has_triton()} False False"


def test_without_triton_the_references_serve() -> None:
    hide = """
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Hidden())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else found(name, *rest)
"""
    assert run(hide) == "False False False"


def test_a_cpu_tensor_goes_to_the_reference() -> None:
    assert not serves(torch.zeros(1))
    assert not serves(torch.zeros(1), "torch")


def test_an_interpreted_kernel_has_to_be_asked_for(device: torch.device) -> None:
    tensor = torch.zeros(1, device=device)
    assert serves(tensor, "triton")
    with using("triton"):
        assert serves(tensor)
        assert not serves(tensor, "torch")
        with using("torch"):
            assert not serves(tensor)
        assert serves(tensor)
    assert serves(tensor) == tensor.is_cuda


def test_dtypes_that_no_kernel_knows_go_to_the_reference(device: torch.device) -> None:
    assert not serves(torch.zeros(1, device=device, dtype=torch.float64))


def test_unknown_implementations_are_refused() -> None:
    with pytest.raises(ValueError, match="impl='cuda'; choose auto, triton, torch"):
        serves(torch.zeros(1), "cuda")
    with pytest.raises(ValueError, match="impl='fast'"), using("fast"):
        pass


def test_a_kernel_that_cannot_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        serves(torch.zeros(1), "triton")
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    with pytest.raises(ValueError, match="pip install triton"):
        serves(torch.zeros(1), "triton")


def test_old_gpus_run_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor: Any = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0), dtype=torch.float16)
    for version, served in (((7, 5), False), ((8, 0), True), ((9, 4), True)):
        monkeypatch.setattr(dispatch, "capability", lambda _, version=version: version)
        assert serves(tensor) == served
    monkeypatch.setattr(dispatch, "capability", lambda _: (7, 5))
    assert not serves(tensor, "torch")
    with pytest.raises(
        ValueError, match=r"capability 7\.5: the kernels need 8\.0; use impl='torch'"
    ):
        serves(tensor, "triton")


def test_without_a_compiler_the_reference_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    build._warn.cache_clear()
    source = tmp_path / "an_op" / "kernel.cpp"
    with caplog.at_level("INFO", "hf_spec_kernels"):
        for _ in range(2):
            assert dispatch.implementation(torch.zeros(1), "auto", source) == "torch"
    reason = "no C++ compiler was found at CXX=/nowhere/c++; install g++ or clang, or set CXX"
    assert caplog.record_tuples == [
        (
            "hf_spec_kernels.build",
            logging.WARNING,
            f"PyTorch operations replace C++ kernels and are slower: {reason}",
        ),
        (
            "hf_spec_kernels.dispatch",
            logging.INFO,
            f"an_op runs in PyTorch on the CPU: {reason}",
        ),
    ]
    with pytest.raises(ValueError, match=r"impl='cpp' cannot run here: no C\+\+ compiler"):
        dispatch.implementation(torch.zeros(1), "cpp", source)
    assert dispatch.implementation(torch.zeros(1), "torch", source) == "torch"


def test_new_memory_is_full_of_nan() -> None:
    """The other tests in this folder rely on it."""
    tensor = torch.zeros(2)
    for fresh in (torch.empty(3), tensor.new_empty(3), torch.empty_like(tensor)):
        assert fresh.isnan().all()


def test_broadcast_sizes_are_checked_and_scalars_pass() -> None:
    check_tensor("x", torch.zeros(()), (), torch.float32, torch.device("cpu"))
    check_tensor("x", torch.zeros(3, 1).T, (1, 3), torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\), expected \(2, any, 3\)"):
        check_tensor("x", torch.zeros(2, 3), (2, None, 3), torch.float32, torch.device("cpu"))
