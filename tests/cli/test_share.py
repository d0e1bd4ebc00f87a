"""Command-line tests of `hf-spec import-head`, `export`, `shrink`, `card` and `push`."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from typer.testing import CliRunner

from hf_spec import SpecAdapter
from hf_spec.adapters.adapter import WEIGHTS_NAME
from hf_spec.cli.app import build_app
from tests.adapters.local_hub import LocalHub, closed_port
from tests.adapters.samples import save_sample
from tests.adapters.test_hub import TOKEN, hub  # noqa: F401 - the fixture
from tests.published_heads import plain_config, sample
from tests.tiny_models import build

# hf-spec import-head


def test_a_pickle_and_no_pickle(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(plain_config()))
    arguments = ["import-head", str(source), str(tmp_path / "out")]
    refused = CliRunner().invoke(build_app(), arguments)
    assert refused.exit_code == 2
    assert "no pickle file" in refused.output.replace("\n", " ")
    torch.save({"x": torch.ones(1)}, source / "pytorch_model.bin")
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "model.safetensors").is_file()


# hf-spec export


def test_a_folder_and_the_next_command(tmp_path: Path) -> None:
    build("llama").config.save_pretrained(tmp_path / "target")
    out = tmp_path / "out"
    arguments = ["export", sample().folder, str(out), "--base-model", str(tmp_path / "target")]
    done = CliRunner().invoke(build_app(), [*arguments, "--for", "sglang"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("next: python -m sglang.launch_server --model-path ")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    again = CliRunner().invoke(build_app(), [*arguments, "--for", "sglang"])
    assert again.exit_code == 2
    assert "exists already" in " ".join(again.output.split())


def test_engines_are_named(tmp_path: Path) -> None:
    arguments = ["export", sample().folder, str(tmp_path / "out")]
    for more in ([], ["--for", "tgi"]):
        refused = CliRunner().invoke(build_app(), [*arguments, *more])
        assert refused.exit_code == 2
        assert "--for" in refused.output


# hf-spec shrink


@pytest.mark.parametrize("bits", [8, 4])
def test_the_file_is_smaller_and_the_rest_as_it_was(tmp_path: Path, bits: int) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    (folder / "README.md").write_text("A card.")
    before, size = SpecAdapter.from_pretrained(folder), (folder / WEIGHTS_NAME).stat().st_size
    result = CliRunner().invoke(build_app(), ["shrink", str(folder), "--bits", str(bits)])
    assert result.exit_code == 0, result.output
    after = SpecAdapter.from_pretrained(folder)
    assert (folder / WEIGHTS_NAME).stat().st_size < size * (0.75 if bits == 8 else 0.6)
    assert (after.bits, after.options) == (bits, before.options)
    assert (folder / "README.md").read_text() == "A card."


def test_bits_that_there_are_not(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    before = (folder / WEIGHTS_NAME).read_bytes()
    result = CliRunner().invoke(build_app(), ["shrink", str(folder), "--bits", "3"])
    assert result.exit_code != 0
    assert (folder / WEIGHTS_NAME).read_bytes() == before


# hf-spec card


def write_card(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["card", *map(str, arguments)])


def test_a_card(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    result = write_card(folder)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{folder / 'README.md'}\n"
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "hf_spec"
    assert 'spec_strategy="falcon"' in card.text


def test_what_is_told_and_what_is_there(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    (folder / "README.md").write_text("mine")
    result = write_card(folder)
    assert result.exit_code == 2
    assert (folder / "README.md").read_text() == "mine"
    told = ("--base-model", "me/base", "--license", "mit", "--dataset", "a/b", "--dataset", "c/d")
    result = write_card(folder, *told, "--overwrite")
    assert result.exit_code == 0, result.output
    data = ModelCard.load(folder / "README.md").data
    assert (data.base_model, data.license, data.datasets) == ("me/base", "mit", ["a/b", "c/d"])


def test_no_adapter(tmp_path: Path) -> None:
    result = write_card(tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_results(tmp_path: Path) -> None:
    assert write_card(tmp_path / "nothing").exit_code == 2
    assert write_card(tmp_path, "--results", tmp_path / "nothing.json").exit_code == 2


# hf-spec push


def upload(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["push", *map(str, arguments)])


@pytest.fixture
def server(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> LocalHub:  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_an_adapter_arrives(server: LocalHub, tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    result = upload(folder, "me/head", "--private", "--revision", "next")
    assert result.exit_code == 0, result.output
    repository = server.repositories["me/head"]
    assert repository.private
    head = repository.branches["next"]
    assert result.stdout == f"{server.url}/me/head/commit/{head}\n"
    assert "adapter_model.safetensors" in repository.commits[head]


def test_no_adapter_to_push(server: LocalHub, tmp_path: Path) -> None:
    result = upload(tmp_path, "me/head")
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output
    assert server.requests == []


def test_a_hub_that_cannot_be_reached(
    hub: LocalHub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    result = upload(folder, "me/head")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: the Hub at {constants.ENDPOINT} cannot be reached")
    assert result.stderr.count("\n") == 1
    assert hub.requests == []


def test_no_folder(tmp_path: Path) -> None:
    assert upload(tmp_path / "nothing", "me/head").exit_code == 2
