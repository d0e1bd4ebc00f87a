"""Checks in a single process; tests/targets/test_tensor_parallel.py tests two processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

from hf_spec.backend.device.distributed_checks import (
    check_ranks,
    check_sharding,
    tensor_parallel_size,
)
from hf_spec.common.errors import UnsupportedError
from tests.tiny_models import build


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """Join a process group that has no other member."""
    distributed.init_process_group("gloo", f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_whole_model_is_not_asked_about() -> None:
    model = build("llama")
    check_sharding(model)
    check_ranks(model, torch.zeros(1, 3, dtype=torch.long), do_sample=True)
    assert tensor_parallel_size(model) == 1


def test_beside_a_process_group_too(one_process: None) -> None:
    check_sharding(build("llama"))


def test_full_sharding_is_refused(one_process: None) -> None:
    source = build("llama")
    model = type(source)(source.config)
    fully_shard(model)
    with pytest.raises(UnsupportedError, match="FSDP or ZeRO-3"):
        check_sharding(model)
