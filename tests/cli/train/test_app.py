"""`hf-spec train`: from responses to trained adapters and heads, and one-line errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from hf_spec.adapters.folder import load_adapter
from hf_spec.cli.app import build_app
from hf_spec.common.prompts import load_prompts
from hf_spec.methods.falcon import training as falcon
from hf_spec.training import features
from hf_spec.training.responses import read_responses
from tests.cli.train.cli_files import (
    next_step,
    run,
    save_model,
    save_responses,
    short_bench,
)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return save_responses(tmp_path / "responses.jsonl")


@pytest.mark.smoke
def test_one_task(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    out = ("--responses", responses, "--out", tmp_path / "a")
    result = run("train", "disco", model_folder, *out, "--draft-layers", 1, "--task", "code")
    assert result.exit_code == 0, result.output
    assert load_adapter(tmp_path / "a").options["training"]["tasks"] == ["code"]
    [start] = json.loads((tmp_path / "a" / "training" / "run.json").read_text())["starts"]
    assert (start["options"]["draft_layers"], start["options"]["labels"]) == (1, "hard")
    assert start["settings"]["seed"] == 0


@pytest.mark.parametrize("drafts", [(), ("--draft", "x", "--draft-layers", "2")])
def test_one_draft_model(drafts: tuple[str, ...], responses: Path, tmp_path: Path) -> None:
    out = ("--responses", responses, "--out", tmp_path / "a")
    result = run("train", "disco", "unused", *out, *drafts)
    assert result.exit_code == 2
    assert "--draft-layers" in result.output


def test_errors_come_in_one_sentence(model_folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    result = run(
        *("train", "disco", model_folder, "--responses", wrong),
        *("--out", tmp_path / "a", "--draft-layers", 1),
    )
    assert result.exit_code == 2
    assert "not a file of responses" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = run("train", "--help").output
    for name in (
        "responses",
        "block",
        "draft",
        "disco",
        "falcon",
        "eagle",
        "medusa",
        "mtp",
        "sdsat",
    ):
        assert name in text
    assert "MODEL" in run("train", "disco", "--help").output
    assert "spec_strategy" in " ".join(run("train", "disco", "--help").output.split())


def test_prompts_of_the_benchmarks_are_not_learned_from(model_folder: Path, tmp_path: Path) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    reported = load_prompts(per_task=1, tasks=["qa"])[0]
    rows = [
        {"id": name, "task": "qa", "turns": [text]}
        for name, text in (("a", "ba"), ("b", reported.turns[0]))
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--prompts", prompts, "--out", answers, "--max-new-tokens", 2)
    result = run("train", "responses", model_folder, *given)
    assert result.exit_code == 0, result.output
    assert "1 of 2 prompts share text" in " ".join(result.output.split())
    assert [answer.id for answer in read_responses(answers)] == ["a"]


@pytest.mark.parametrize(("kept", "part"), [("last", "falcon"), ("fused", "eagle")])
def test_features_that_were_kept_serve_the_next_training(
    kept: str, part: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    rows = [{"id": f"p{n}", "task": "qa", "turns": ["ba" * (n % 4 + 1)]} for n in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--prompts", prompts, "--out", answers, "--max-new-tokens", 6)
    result = run("train", "responses", model_folder, *given, "--features", kept)
    assert result.exit_code == 0, result.output
    assert next_step(result)[:2] == ["train", part]

    def refuse(model: object, batch: list[object], layers: object) -> None:
        raise AssertionError(f"features of {len(batch)} texts are computed again")

    # The command computes features of a few texts itself, to determine their size.
    monkeypatch.setattr(
        falcon, "hidden_sizes", lambda model, texts, layers: [torch.ones(32)] * len(layers)
    )
    monkeypatch.setattr(features, "text_features", refuse)
    result = run(*next_step(result), "--num-train-epochs", 1, "--vocab-size", 0)
    assert result.exit_code == 0, result.output


def test_from_prompts_to_a_trained_draft(model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "task": "qa", "turns": ["ba" * (n + 1)]} for n in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, out = tmp_path / "answers.jsonl", tmp_path / "draft"
    runner, app = CliRunner(), build_app()
    common = [str(model_folder), "--dtype", "float32"]
    arguments = ["--prompts", str(prompts), "--out", str(answers), "--max-new-tokens", "6"]
    result = runner.invoke(app, ["train", "responses", *common, *arguments])
    assert result.exit_code == 0, result.output
    assert "0 prompts were too long" in result.output
    assert len(answers.read_text().splitlines()) == 41
    words = next_step(result)
    assert words[:3] == ["train", "falcon", str(model_folder)]
    assert words[3:5] == ["--responses", str(answers)]
    assert run(*words, "--num-train-epochs", 1, "--vocab-size", 0).exit_code == 0
    assert load_adapter(tmp_path / "answers-head", "falcon")
    arguments = ["--responses", str(answers), "--out", str(out), "--num-layers", "1", "--rank", "2"]
    result = runner.invoke(app, ["train", "draft", *common, *arguments, "--num-train-epochs", "1"])
    assert result.exit_code == 0, result.output
    assert "agreement" in result.output
    assert next_step(result)[:4] == ["bench", str(model_folder), "--strategy", f"tree@{out}"]
    assert load_adapter(out, "draft").options["num_layers"] == 1
    assert (tmp_path / "answers.teacher").is_dir()


class TestFalcon:
    SMALL = ("--num-train-epochs", 2, "--batch-tokens", 60, "--vocab-size", 0)

    def test_two_files_with_features_beside_them(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        other = responses.with_name("others.jsonl")
        other.write_text(responses.read_text())
        out = tmp_path / "adapter"
        train = ("train", "falcon", model_folder, "--out", out, "--dtype", "float32")
        files = ("--responses", responses, "--responses", other)
        options = ("--block-size", 3, "--csgd", "released", "--soft-weight", 0.5, "--seed", 4)
        result = run(*train, *files, *options, *self.SMALL)
        assert result.exit_code == 0, result.output
        text = " ".join(result.output.split())
        assert "the features of 8 texts take" in text
        assert "slot_3_given" in text
        for file in (responses, other):
            assert list(file.with_suffix(".features").glob("*.safetensors"))
        found = load_adapter(out, "falcon").options
        assert found["shape"]["block_size"] == 3
        training = found["training"]
        assert (training["texts"], training["seed"]) == (16, 4)
        assert (training["csgd"]["schedule"], training["csgd"]["soft_weight"]) == ("released", 0.5)
        # Continue from a head, without features on disk.
        again = ("--init", out, "--no-store", "--block-size", 3)
        train = ("train", "falcon", model_folder, "--out", tmp_path / "again")
        result = run(*train, "--responses", responses, *again, *self.SMALL)
        assert result.exit_code == 0, result.output
        assert load_adapter(tmp_path / "again").options["training"]["start"] == out.name

    def test_wrong_choices_and_heads(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        train = ("train", "falcon", model_folder, "--responses", responses)
        result = run(*train, "--out", tmp_path / "a", "--noise", "gauss")
        assert result.exit_code == 2
        text = " ".join(result.output.replace("│", " ").split())
        assert "'gauss' is not one of 'paper', 'released', 'off'" in text
        result = run(*train, "--out", tmp_path / "a", "--init", tmp_path / "none")
        assert result.exit_code == 2
        assert "there is no folder" in " ".join(result.output.split())
        assert "Traceback" not in result.output

    def test_help_teaches(self) -> None:
        text = " ".join(run("train", "falcon", "--help").output.split())
        assert 'spec_strategy="falcon"' in text
        for option in ("--block-size", "--csgd", "--init", "--[no-]store", "--responses"):
            assert option in text

    def test_the_next_command_works(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "my head"
        train = ("train", "falcon", model_folder, "--responses", responses, "--out", out)
        words = next_step(run(*train, *self.SMALL, "--dtype", "bfloat16"))
        assert words[:4] == ["bench", str(model_folder), "--strategy", f"falcon@{out}"]
        assert words[4:] == ["--dtype", "bfloat16"]
        result = run(*words, *short_bench(tmp_path))
        assert result.exit_code == 0, result.output
        assert "falcon@my head  " in result.stdout


class TestEagle:
    SMALL = (
        "--num-train-epochs",
        2,
        "--batch-tokens",
        60,
        "--dtype",
        "float32",
        "--vocab-size",
        40,
    )

    def test_it_trains_and_the_next_command_works(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "my head"
        train = ("train", "eagle", model_folder, "--responses", responses, "--out", out)
        result = run(*train, "--steps", 2, "--mlp-size", 16, *self.SMALL)
        assert result.exit_code == 0, result.output
        text = " ".join(result.output.split())
        assert "slot_2_given" in text
        assert "slot_3" not in text
        assert list(responses.with_suffix(".features-of-4").glob("*.safetensors"))
        told = json.loads((out / "config.json").read_text())
        assert told["transformer_layer_config"]["intermediate_size"] == 16
        assert told["draft_vocab_size"] == 40
        words = next_step(result)
        assert words[:4] == ["bench", str(model_folder), "--strategy", f"eagle@{out}"]
        result = run(*words, *short_bench(tmp_path))
        assert result.exit_code == 0, result.output
        assert "eagle@my head  " in result.stdout
        # Continue from the head, with another size and with the same size.
        train = (*train[:-1], tmp_path / "again", "--init", out, "--no-store", *self.SMALL)
        result = run(*train, "--mlp-size", 32)
        assert result.exit_code == 2
        assert "has an MLP of width 16, but mlp_size is 32" in " ".join(result.output.split())
        result = run(*train)
        assert result.exit_code == 0, result.output
        told = json.loads((tmp_path / "again" / "config.json").read_text())
        assert told["hf_spec"]["training"]["start"] == "my head"


@pytest.mark.parametrize(
    ("name", "strategy", "options"),
    [
        ("medusa", "heads", ("--num-heads", 2, "--vocab-size", 40)),
        ("block", "block", ("--block-size", 3, "--num-layers", 1, "--vocab-size", 40)),
        ("mtp", "mtp", ("--steps", 2)),
    ],
)
def test_other_heads_and_their_next_commands(
    name: str,
    strategy: str,
    options: tuple[object, ...],
    model_folder: Path,
    responses: Path,
    tmp_path: Path,
) -> None:
    """Train a head with held-out figures, run the suggested benchmark, and train it further."""
    out, small = tmp_path / "my head", ("--num-train-epochs", 1, "--batch-tokens", 60)
    train = ("train", name, model_folder, "--responses", responses, *options, *small)
    result = run(*train, "--out", out)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "slot_2_given" in text
    assert "slot_3" not in text
    words = next_step(result)
    assert words[:4] == ["bench", str(model_folder), "--strategy", f"{strategy}@{out}"]
    result = run(*words, *short_bench(tmp_path))
    assert result.exit_code == 0, result.output
    assert f"{strategy}@my head" in result.stdout
    result = run(*train, "--out", tmp_path / "again", "--init", out, "--no-store")
    assert result.exit_code == 0, result.output
    told = json.loads((tmp_path / "again" / "config.json").read_text())
    assert told["hf_spec"]["training"]["start"] == "my head"


def test_a_tracker_that_is_not_installed(
    model_folder: Path, responses: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_spec.training.trainer.get_available_trackers", list)
    train = ("train", "mtp", model_folder, "--responses", responses, "--out", tmp_path / "a")
    result = run(*train, "--log-with", "wandb")
    assert result.exit_code == 2
    assert "pip install wandb" in " ".join(result.output.split())
    result = run(*train, "--log-with", "mlflow")
    assert result.exit_code == 2
    assert "'mlflow' is not one of" in " ".join(result.output.replace("│", " ").split())


class TestSdsat:
    SMALL = ("--num-train-epochs", 2, "--batch-tokens", 60, "--dtype", "float32", "--rank", 2)

    def test_two_files_with_opinions(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        other = responses.with_name("others.jsonl")
        other.write_text(responses.read_text())
        out = tmp_path / "adapter"
        train = ("train", "sdsat", model_folder, "--out", out)
        files = ("--responses", responses, "--responses", other, "--teacher", tmp_path / "said")
        options = ("--window", 3, "--diverse", "--layout", "replaced", "--soft-weight", 0.4)
        more = ("--start-share", 0.5, "--lora-layer", "q_proj", "--num-adaptive", 2, "--seed", 4)
        result = run(*train, *files, *options, *more, *self.SMALL)
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
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        train = ("train", "sdsat", model_folder, "--responses", responses)
        result = run(*train, "--out", tmp_path / "a", "--mode", "embeddings", *self.SMALL)
        assert result.exit_code == 0, result.output
        assert not list(tmp_path.glob("*.teacher"))
        options = load_adapter(tmp_path / "a", "sdsat").options
        assert (options["num_adaptive"], options["training"]["mode"]) == (5, "embeddings")

    def test_a_fine_tuned_model(self, model_folder: Path, responses: Path, tmp_path: Path) -> None:
        train = ("train", "sdsat", model_folder, "--responses", responses)
        full = ("--out", tmp_path / "a", "--mode", "full", "--token-id", 96)
        result = run(*train, *full, *self.SMALL)
        assert result.exit_code == 0, result.output
        assert "tokens_per_forward" in " ".join(result.output.split())
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        assert model.config.sdsat["token_ids"] == [96]
        assert AutoTokenizer.from_pretrained(tmp_path / "a").pad_token == "<pad>"

    def test_wrong_choices(self, model_folder: Path, responses: Path, tmp_path: Path) -> None:
        train = ("train", "sdsat", model_folder, "--responses", responses)
        for options, message in (
            (("--mode", "half"), "is not one of 'gated', 'embeddings', 'lora', 'full'"),
            (("--mode", "lora", "--layout", "branches"), "choose layout='replaced'"),
            (("--infilling", 0.5), "no infilling tokens"),
        ):
            result = run(*train, "--out", tmp_path / "a", *options, *self.SMALL)
            assert result.exit_code == 2
            # The frame wraps long messages.
            assert message in " ".join(result.output.replace("│", " ").split())
            assert "Traceback" not in result.output

    def test_help_teaches(self) -> None:
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
        self,
        options: tuple[str, ...],
        words: list[str],
        model_folder: Path,
        responses: Path,
        tmp_path: Path,
    ) -> None:
        out = tmp_path / "a"
        train = ("train", "sdsat", model_folder, "--responses", responses, "--out", out)
        found = next_step(run(*train, "--window", 2, *options, *self.SMALL))
        expected = [word.format(model=model_folder, out=out) for word in words]
        assert found == [*expected, "--dtype", "float32"]
        result = run(*found, *short_bench(tmp_path))
        assert result.exit_code == 0, result.output

    def test_what_must_be_merged_first(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        train = ("train", "sdsat", model_folder, "--responses", responses)
        result = run(*train, "--out", tmp_path / "a", "--mode", "lora", *self.SMALL)
        assert result.exit_code == 0, result.output
        assert f"merge_lora(model, {str(tmp_path / 'a')!r})" in result.stdout
