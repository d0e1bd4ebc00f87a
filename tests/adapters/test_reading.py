"""Valid files and options of an adapter; invalid ones are in `test_damaged.py`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_spec import AssistantError
from hf_spec.adapters.reading import (
    VOCABULARY,
    check_tensors,
    read_json,
    read_tensors,
    read_vocabulary,
    regular_file,
    whole_number,
)


def test_links_inside_the_folder_and_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--a/snapshots/abc"
    blobs = tmp_path / "models--org--a/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "1").write_text('{"a": 1}')
    (snapshot / "config").symlink_to("../../blobs/1")
    (snapshot / "same").symlink_to("config")
    for name in ("config", "same"):
        assert read_json(regular_file(snapshot, name)) == {"a": 1}
    (tmp_path / "secret").write_text("{}")
    (snapshot / "out").symlink_to("../../../secret")
    with pytest.raises(AssistantError, match="link out of its folder"):
        regular_file(snapshot, "out")
    # The folder itself may be a link.
    (tmp_path / "link").symlink_to(snapshot)
    assert regular_file(tmp_path / "link", "config").exists()


def test_a_file_that_must_not_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config"
    path.write_text("{}")
    path.chmod(0)
    try:
        path.read_text()
    except PermissionError:
        with pytest.raises(AssistantError, match="cannot be read"):
            read_json(path)
    else:
        pytest.skip("this user may read everything")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32])
def test_tensors_come_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    saved = {"a": torch.arange(6).view(2, 3).to(dtype), "b": torch.ones(1).to(dtype)}
    save_file(saved, tmp_path / "w")
    found = read_tensors(tmp_path, "w")
    assert found.keys() == saved.keys()
    assert all(found[n].dtype == dtype and torch.equal(found[n], saved[n]) for n in saved)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, r"a is missing, not \(2, 3\)"),
        ({"a": torch.zeros(3, 2)}, r"a is \(3, 2\), not \(2, 3\)"),
        ({"a": torch.zeros(2, 3), "b": torch.zeros(1)}, r"b is \(1,\), not absent"),
        ({"a": torch.zeros(2, 3, dtype=torch.int32)}, "a is of torch.int32"),
    ],
)
def test_weights_that_do_not_fit(found: dict[str, torch.Tensor], message: str) -> None:
    check_tensors("the adapter", {"a": torch.zeros(2, 3)}, {"a": (2, 3)})
    with pytest.raises(AssistantError, match=message):
        check_tensors("the adapter", found, {"a": (2, 3)})


def test_vocabularies() -> None:
    assert read_vocabulary("it", {}, 9) is None
    tokens = torch.tensor([0, 3, 8], dtype=torch.int32)
    found = read_vocabulary("it", {VOCABULARY: tokens}, 9)
    assert found is not None
    assert found.dtype == torch.long
    assert found.tolist() == [0, 3, 8]
    for values in ([3, 3], [3, 2], [-1, 2], [2, 9]):
        with pytest.raises(AssistantError, match="tokens below 9 in ascending order"):
            read_vocabulary("it", {VOCABULARY: torch.tensor(values)}, 9)


def test_whole_numbers() -> None:
    assert [whole_number("it", {"n": value}, "n", 1, 3) for value in (1, 3)] == [1, 3]
    for value in (0, 4, True, 2.0, "2", None):
        with pytest.raises(AssistantError, match=r"it has n=.* from 1 to 3"):
            whole_number("it", {"n": value}, "n", 1, 3)
