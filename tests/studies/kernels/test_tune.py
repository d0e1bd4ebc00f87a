"""Kernel tuner: the fastest candidate that fits is written, and launches use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hf_spec_kernels import configs, launches

from examples.studies.kernels import tune as tuner
from examples.studies.kernels.tune import (
    CANDIDATES,
    Call,
    attention_call,
    main,
    tune,
    vocabulary_call,
    write,
)
from tests.kernels.conftest import device  # noqa: F401 - the fixture


def test_every_op_with_configurations_is_tuned() -> None:
    files = configs.FOLDER.glob("*/default.json")
    assert {file.parent.name for file in files} == set(CANDIDATES)


@pytest.mark.parametrize("op", CANDIDATES)
def test_candidates_have_the_defaults_arguments(op: str) -> None:
    defaults = json.loads(configs.config_file(op, "default").read_text())
    for arguments in defaults.values():
        assert arguments.keys() == CANDIDATES[op].keys()


def test_the_fastest_that_fits_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.errors import OutOfResources

    monkeypatch.setitem(CANDIDATES, "verify_tree", {"BLOCK_V": (1, 2, 3), "num_warps": (4, 8)})

    def timer(call: Call) -> float:
        call()
        tried = configs.config("verify_tree", "32bit", torch.device("cpu"))
        if tried["BLOCK_V"] == 2:
            raise OutOfResources(2, 1, "shared memory")
        return tried["num_warps"] / tried["BLOCK_V"]

    calls: list[int] = []
    assert tune("verify_tree", "32bit", lambda: calls.append(1), timer) == {
        "BLOCK_V": 3,
        "num_warps": 4,
    }
    assert len(calls) == 6

    def never(call: Call) -> float:
        raise OutOfResources(2, 1, "shared memory")

    with pytest.raises(RuntimeError, match="no tile sizes of verify_tree for 32bit"):
        tune("verify_tree", "32bit", lambda: None, never)


def test_calls_launch_their_op(
    device: torch.device,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuner, "KV_HEADS", 1)
    keys = {op: json.loads(configs.config_file(op, "default").read_text()) for op in CANDIDATES}
    bits = "32bit" if device.type == "cpu" else "16bit"
    for op in CANDIDATES:
        before = launches[op]
        if op == "ragged_tree_attention":
            key = f"head64_{bits}_few"
            attention_call(key, device, context=20)()
        else:
            key = bits
            vocabulary_call(op, key, device, vocab=50, rows=4)()
        assert key in keys[op]
        assert launches[op] == before + 1


def test_what_is_written_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "device_name", lambda _: "some_gpu")
    (tmp_path / "op").mkdir()
    write(configs.config_file("op", "default"), {"small": {"BLOCK": 16}, "large": {"BLOCK": 32}})
    write(configs.config_file("op", "some_gpu"), {"large": {"BLOCK": 64}})
    configs._read.cache_clear()
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    assert configs.config("op", "large", gpu) == {"BLOCK": 64}
    assert configs.config("op", "small", gpu) == {"BLOCK": 16}
    assert configs.config("op", "large", cpu) == {"BLOCK": 32}
    with configs.trying("op", {"BLOCK": 128}):
        assert configs.config("op", "small", gpu) == {"BLOCK": 128}
    assert configs.config("op", "small", gpu) == {"BLOCK": 16}
    configs._read.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--op", "verify_tree"])
    assert "there is none here" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_command_writes_a_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,  # noqa: F811
) -> None:
    if device.type == "cpu":
        pytest.skip("times on a GPU")
    (tmp_path / "verify_tree").mkdir()
    default = configs.config_file("verify_tree", "default").read_text()
    (tmp_path / "verify_tree" / "default.json").write_text(default)
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    configs._read.cache_clear()
    main(["--op", "verify_tree", "--key", "16bit"])
    (written,) = (tmp_path / "verify_tree").glob(f"{configs.device_name(device)}.json")
    assert json.loads(written.read_text())["16bit"].keys() == {"BLOCK_V", "num_warps"}


def test_products_of_float32_are_not_tuned_into_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CANDIDATES, "ragged_tree_attention", {"BLOCK_M": (32, 64)})
    tried: list[int] = []

    def timer(call: Call) -> float:
        tried.append(configs.config("ragged_tree_attention", "any", torch.device("cpu"))["BLOCK_M"])
        return 1.0

    for key in ("head64_32bit_many", "head64_16bit_many"):
        tune("ragged_tree_attention", key, lambda: None, timer)
    assert tried == [32, 32, 64]
