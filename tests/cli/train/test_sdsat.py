"""`hf-spec train sdsat`: options reach the adapter or the model, and what to do next."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_spec.adapters.folder import load_adapter
from tests.cli.train.cli_files import next_step, run, save_model, save_responses, short_bench


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return save_responses(tmp_path / "responses.jsonl")


SMALL = ("--epochs", 2, "--batch-tokens", 60, "--dtype", "float32", "--rank", 2)


def test_two_files_with_opinions(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    other = responses.with_name("others.jsonl")
    other.write_text(responses.read_text())
    out = tmp_path / "adapter"
    train = ("train", "sdsat", "--model", model_folder, "--out", out)
    files = ("--responses", responses, "--responses", other, "--teacher", tmp_path / "said")
    options = ("--window", 3, "--diverse", "--layout", "replaced", "--soft-weight", 0.4)
    more = ("--start-share", 0.5, "--lora-layer", "q_proj", "--num-adaptive", 2, "--seed", 4)
    result = run(*train, *files, *options, *more, *SMALL)
    assert result.exit_code == 0, result.output
    assert "slot_3_given" in " ".join(result.output.split())
    for name in ("responses", "others"):
        assert list((tmp_path / "said" / name).glob("*.safetensors"))
    adapter = load_adapter(out, "sdsat")
    assert adapter.options["num_adaptive"] == 2
    assert any("q_proj" in name for name in adapter.tensors)
    assert not any("k_proj" in name for name in adapter.tensors)
    expected = {
        "mode": "gated",
        "window": 3,
        "diverse": True,
        "rank": 2,
        "layout": "replaced",
        "soft_weight": 0.4,
        "start_share": 0.5,
        "seed": 4,
        "examples": 16,
    }
    assert expected.items() <= adapter.options["training"].items()


def test_no_opinions_without_their_weight(
    model_folder: Path, responses: Path, tmp_path: Path
) -> None:
    train = ("train", "sdsat", "--model", model_folder, "--responses", responses)
    result = run(*train, "--out", tmp_path / "a", "--mode", "embeddings", *SMALL)
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.glob("*.teacher"))
    options = load_adapter(tmp_path / "a", "sdsat").options
    assert (options["num_adaptive"], options["training"]["mode"]) == (5, "embeddings")


def test_a_fine_tuned_model(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    train = ("train", "sdsat", "--model", model_folder, "--responses", responses)
    full = ("--out", tmp_path / "a", "--mode", "full", "--token-id", 96)
    result = run(*train, *full, *SMALL)
    assert result.exit_code == 0, result.output
    assert "tokens_per_forward" in " ".join(result.output.split())
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert model.config.sdsat["token_ids"] == [96]
    assert AutoTokenizer.from_pretrained(tmp_path / "a").pad_token == "<pad>"


def test_wrong_choices(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    train = ("train", "sdsat", "--model", model_folder, "--responses", responses)
    for options, message in (
        (("--mode", "half"), "choose one of gated, embeddings, lora, full"),
        (("--mode", "lora", "--layout", "branches"), "choose layout='replaced'"),
        (("--infilling", 0.5), "no infilling tokens"),
    ):
        result = run(*train, "--out", tmp_path / "a", *options, *SMALL)
        assert result.exit_code == 2
        # The box around a message breaks its lines.
        assert message in " ".join(result.output.replace("│", " ").split())
        assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = " ".join(run("train", "sdsat", "--help").output.split())
    assert 'spec_strategy="sdsat"' in text
    for option in ("--mode", "--window", "--layout", "--infilling", "--teacher"):
        assert option in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--mode", "embeddings"), ["bench", "{model}", "--strategy", "sdsat@{out}"]),
        (("--mode", "full", "--token-id", 96), ["bench", "{out}", "--strategy", "sdsat"]),
    ],
)
def test_the_next_command_works(
    options: tuple[str, ...],
    words: list[str],
    model_folder: Path,
    responses: Path,
    tmp_path: Path,
) -> None:
    out = tmp_path / "a"
    train = ("train", "sdsat", "--model", model_folder, "--responses", responses, "--out", out)
    found = next_step(run(*train, "--window", 2, *options, *SMALL))
    expected = [word.format(model=model_folder, out=out) for word in words]
    assert found == [*expected, "--dtype", "float32"]
    result = run(*found, *short_bench(tmp_path))
    assert result.exit_code == 0, result.output


def test_what_must_be_merged_first(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    train = ("train", "sdsat", "--model", model_folder, "--responses", responses)
    result = run(*train, "--out", tmp_path / "a", "--mode", "lora", *SMALL)
    assert result.exit_code == 0, result.output
    assert f"merge_lora(model, {str(tmp_path / 'a')!r})" in result.stdout
