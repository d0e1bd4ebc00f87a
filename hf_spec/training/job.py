"""One run of `hf-spec train`: what a method's training gets, and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedModel

from hf_spec.training.answers import Example, teacher_examples
from hf_spec.training.features import Text, disk_need, features_of, in_words, stored_texts
from hf_spec.training.responses import Response, read_responses
from hf_spec.training.trainer import processes

Item = TypeVar("Item")


class ResultTable(NamedTuple):
    """Figures that are shown as a table."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class TrainingResult:
    """Figures of a training on the held-out answers, by name; a table is shown instead of them.

    `whole_model` is True if the output folder is a model of its own, not a part for the target.
    `next_step` is suggested to the user; None for `hf-spec bench` of the result.
    """

    figures: Mapping[str, float]
    table: ResultTable | None = None
    whole_model: bool = False
    next_step: str | None = None


@dataclass(frozen=True)
class TrainingJob:
    """Options of one run of `hf-spec train`, and the data that they name.

    `files` are files of answers, `out` is the folder of the result. `settings` and `options` belong
    to the method, `run` to the shared training loop (`TrainSettings`), `data` to the computed data
    (`TeacherOptions` or `FeatureOptions`). With `several_files`, a named data folder has one folder
    inside for every file. `notify` shows a message to the user.
    """

    files: Sequence[Path]
    out: Path
    settings: Any
    load_target: Callable[[], PreTrainedModel]
    load_tokenizer: Callable[[], Any]
    run: Any = None
    data: Any = None
    options: Any = None
    several_files: bool = True
    notify: Callable[[str], None] = print

    @cached_property
    def target(self) -> PreTrainedModel:
        """The target model, loaded on first use."""
        return self.load_target()

    def answers(self) -> list[Response]:
        """Return the answers of all files."""
        return [answer for file in self.files for answer in read_responses(file)]

    def examples(self) -> list[Example]:
        """Return the answers of all files with the target's next-token distributions."""
        compute = partial(teacher_examples, self.target)
        return self.per_file(self.data.teacher, "teacher", compute)

    def texts(self, layers: Sequence[int]) -> list[Text]:
        """Return the answers of all files with the target's features of `layers`.

        With --no-store the features are missing and are computed in every step.
        """

        def compute(answers: list[Response], folder: Path) -> list[Text]:
            if not self.data.store:
                return [Text(answer) for answer in answers]
            need = in_words(disk_need(self.target, answers, layers))
            self.notify(f"the features of {len(answers)} texts take {need} in {folder}")
            return stored_texts(self.target, answers, folder, layers)

        return self.per_file(self.data.features, features_of(layers), compute)

    def per_file(
        self,
        named: Path | None,
        kind: str,
        compute: Callable[[list[Response], Path], list[Item]],
    ) -> list[Item]:
        """Return what `compute` returns for the answers and the data folder of every file.

        The main process computes first, and the others read what it stored. The data folder is in
        the folder `named` by the user, or beside the file with the ending `kind`.
        """
        items: list[Item] = []
        for file in self.files:
            inside = named / file.stem if named is not None and self.several_files else named
            with processes().main_process_first():
                items += compute(list(read_responses(file)), inside or data_folder(file, kind))
        return items


def data_folder(responses: Path, kind: str) -> Path:
    """Return the default folder for data that is computed from a file of answers."""
    return responses.with_suffix(f".{kind}")
