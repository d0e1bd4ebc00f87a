"""A job of `hf-spec train`: its target, and the data from its answer files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_spec.training.features import LAST
from hf_spec.training.job import TrainingJob, data_folder
from hf_spec.training.responses import Response
from hf_spec.training.settings import FeatureOptions, TeacherOptions
from tests.cli.train.cli_files import save_responses
from tests.tiny_models import build


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [save_responses(tmp_path / "a.jsonl"), save_responses(tmp_path / "b.jsonl")]


def job(files: list[Path], **options: Any) -> TrainingJob:
    return TrainingJob(files, Path("out"), None, lambda: build("llama"), lambda: None, **options)


def test_the_target_is_loaded_once_when_it_is_used() -> None:
    loaded: list[str] = []
    lazy = TrainingJob([], Path("out"), None, lambda: loaded.append("x"), lambda: None)  # type: ignore[arg-type, func-returns-value]
    assert loaded == []
    assert lazy.target is lazy.target
    assert loaded == ["x"]


def test_answers_of_all_files(files: list[Path]) -> None:
    assert len(job(files).answers()) == 16


def test_folders_beside_the_files_or_in_one(files: list[Path], tmp_path: Path) -> None:
    def named(answers: list[Response], folder: Path) -> list[str]:
        return [f"{folder.relative_to(tmp_path)} {len(answers)}"]

    folder = tmp_path / "all"
    assert job(files).per_file(None, "teacher", named) == ["a.teacher 8", "b.teacher 8"]
    assert job(files).per_file(folder, "teacher", named) == ["all/a 8", "all/b 8"]
    alone = job(files[:1], several_files=False)
    assert alone.per_file(folder, "teacher", named) == ["all 8"]
    assert alone.per_file(None, "teacher", named) == ["a.teacher 8"]
    assert data_folder(files[0], "features") == tmp_path / "a.features"


def test_examples_have_the_predictions_of_the_target(files: list[Path], tmp_path: Path) -> None:
    examples = job(files[:1], data=TeacherOptions(tmp_path / "said")).examples()
    assert len(examples) == 8
    assert examples[0].top_tokens.shape[0] == len(examples[0].response.response)
    assert list((tmp_path / "said" / "a").glob("*.safetensors"))


def test_texts_have_features_unless_these_are_not_stored(files: list[Path]) -> None:
    said: list[str] = []
    texts = job(files[:1], data=FeatureOptions(), notify=said.append).texts(LAST)
    assert texts[0].features is not None
    assert len(said) == 1
    assert "the features of 8 texts take" in said[0]
    texts = job(files[:1], data=FeatureOptions(store=False), notify=said.append).texts(LAST)
    assert [text.features for text in texts] == [None] * 8
    assert len(said) == 1
