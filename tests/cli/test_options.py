"""Options shared by several commands, and options generated from settings classes."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
import typer
from typer.testing import CliRunner

from hf_spec import OptionError
from hf_spec.cli.options import (
    AnswerSettings,
    Placement,
    UiSettings,
    check_out,
    from_settings,
)
from hf_spec.common.settings import Count, Internal, Named, Settings, Share, setting_fields
from hf_spec.evaluation import settings as bench
from hf_spec.evaluation.settings import SamplingPlan, VerificationPlan
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.draft_model.settings import DraftTrainSettings
from hf_spec.methods.falcon.settings import CsgdSettings, FalconShape, FalconTrainSettings
from hf_spec.methods.sdsat.settings import SdsatTrainSettings
from hf_spec.training.settings import ResponseSettings, TrainSettings
from tests.cli.test_app import LEAVES


@pytest.mark.parametrize("name", [name for name in LEAVES if "card" not in name])
def test_every_command_that_loads_a_model_has_both_options(name: str) -> None:
    parameters = {one.name: one for one in LEAVES[name].params}
    # `export` reads only the target's config.
    if "model" not in parameters or name == "export":
        assert name in {"push", "demo", "import-head", "export", "shrink"}
        return
    assert parameters["dtype"].default == "auto"
    assert parameters["device"].default is None
    assert "float32 on a CPU" in parameters["dtype"].help


def test_what_generate_is_told() -> None:
    assert AnswerSettings().sampling == {"do_sample": False}
    assert AnswerSettings(sample=True).sampling == {"do_sample": True}
    told = AnswerSettings(sample=True, temperature=0.5, top_p=0.9, seed=3).sampling
    assert told == {"do_sample": True, "temperature": 0.5, "top_p": 0.9}


@pytest.mark.parametrize("given", [{"temperature": 0.5}, {"top_p": 0.0}, {"seed": 0}])
def test_useless_without_sample(given: dict[str, Any]) -> None:
    with pytest.raises(typer.BadParameter, match="no effect on greedy decoding; add --do-sample"):
        AnswerSettings(**given)


def test_files_that_cannot_be_written(tmp_path: Path) -> None:
    check_out(None)
    check_out(tmp_path / "results.json")
    with pytest.raises(OptionError, match="there is no folder /no/such"):
        check_out(Path("/no/such/results.json"))
    with pytest.raises(OptionError, match="is a folder; use a file name"):
        check_out(tmp_path)
    source = tmp_path / "prompts.jsonl"
    source.write_text("")
    with pytest.raises(OptionError, match="is the input file; choose another"):
        check_out(tmp_path / "." / "prompts.jsonl", source)
    check_out(tmp_path / "new.jsonl", source)


@dataclass(frozen=True)
class Inner(Settings):
    """A part.

    Attributes:
        depth: how far it goes.
    """

    depth: Count = 3


@dataclass(frozen=True)
class Outer(Settings):
    """A whole.

    Attributes:
        inner: a part.
        width: paths that are kept; None for all.
        limit: most of them; none by default.
        kind: of search.
        sizes: beams to be tried.
        layers: where.
        exact: search again.
        quiet: say nothing.
        seed: of chance.
        share: kept.
        hidden: of no concern.
    """

    inner: Inner = field(default_factory=Inner)
    width: Annotated[Count | None, Named("paths")] = 4
    limit: Count | None = None
    kind: Literal["wide", "deep"] = "wide"
    sizes: tuple[Count, ...] = (1, 2)
    layers: Annotated[tuple[str, ...], Named("layer")] = ()
    exact: bool = True
    quiet: bool = False
    seed: int | None = None
    share: Share = 0.5
    hidden: Internal[int] = 7


class TestOptionsFromSettings:
    """Options of a command that overrides some defaults of its settings."""

    @pytest.fixture
    def call(self) -> Any:
        app, got = typer.Typer(), list[Any]()

        @app.command()
        @from_settings
        def search(*, model: str, settings: Outer, other: Inner2 = OTHER) -> None:
            got.append((model, settings, other))

        def call(*words: str) -> Any:
            result = CliRunner().invoke(app, list(words))
            if result.exit_code:
                return result.exit_code, " ".join(result.output.replace("│", " ").split())
            return got.pop()

        return call

    def test_defaults_are_those_of_the_settings(self, call: Any) -> None:
        assert call("m") == ("m", Outer(), OTHER)

    def test_values_of_every_kind(self, call: Any) -> None:
        words = ("--depth", "5", "--paths", "0", "--limit", "9", "--kind", "deep", "--sizes", "7")
        more = ("--sizes", "8", "--layer", "q", "--no-exact", "--quiet", "--share", "1")
        _, settings, other = call("m", *words, *more, "--speed", "4")
        given = Outer(Inner(5), None, 9, "deep", (7, 8), ("q",), exact=False, quiet=True, share=1.0)
        assert settings == given
        assert other == Inner2(4)

    def test_zero_is_a_value_where_none_is_the_default(self, call: Any) -> None:
        assert call("m", "--seed", "0")[1] == Outer(seed=0)

    @pytest.mark.parametrize(
        ("option", "value"),
        [
            ("--depth", "0"),
            ("--share", "1.5"),
            ("--kind", "flat"),
            ("--no-quiet", None),
            ("--hidden", "3"),
        ],
    )
    def test_what_is_refused(self, call: Any, option: str, value: str | None) -> None:
        status, page = call("m", option, *([] if value is None else [value]))
        assert status == 2
        assert option in page
        if option == "--kind":
            assert "wide" in page

    def test_the_help_is_what_the_settings_say(
        self, call: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("COLUMNS", "160")
        app = typer.Typer()
        app.command()(from_settings(help_only))
        page = " ".join(CliRunner().invoke(app, ["--help"]).output.replace("│", " ").split())
        for text in (
            "How far it goes. [default: 3]",
            "Paths that are kept; 0 for all. [default: 4]",
            "Beams to be tried; may be repeated. [default: 1, 2]",
            "Of search. [default: wide]",
            "--exact --no-exact",
        ):
            assert text in page
        assert "hidden" not in page


@dataclass(frozen=True)
class Inner2(Settings):
    """Another.

    Attributes:
        speed: of it.
    """

    speed: Count = 1


OTHER = Inner2(2)


def help_only(*, settings: Outer) -> None:
    """Do nothing; only the help is used."""


SETTINGS_OF = {
    "train responses": (ResponseSettings,),
    "train draft": (DraftTrainSettings, TrainSettings),
    "train falcon": (*(FalconTrainSettings, FalconShape, CsgdSettings, TrainSettings),),
    "train sdsat": (SdsatTrainSettings, TrainSettings),
    "train disco": (DiscoTrainSettings,),
    "generate": (AnswerSettings, Placement),
    "chat": (AnswerSettings, Placement),
    "bench": (bench.Suite, Placement),
    "verify": (VerificationPlan, SamplingPlan, Placement),
    "calibrate disco": (bench.CalibrationSettings,),
    "calibrate falcon": (bench.TreeSettings,),
}


@pytest.mark.parametrize("name", SETTINGS_OF)
def test_every_setting_has_its_option_and_its_words(name: str) -> None:
    options = {one.name: one for one in LEAVES[name].params}
    found = [setting for kind in SETTINGS_OF[name] for setting in setting_fields(kind)]
    for setting in found:
        assert setting.help, setting
        if setting.option is not None and not inspect.isclass(setting.kind):
            assert options[setting.option].help
        elif setting.option is not None and not issubclass(setting.kind, Settings):
            assert (
                setting.help[1:].split(";")[0].removesuffix(".").split("None")[0]
                in options[setting.option].help
            )


def test_by_default_the_page_is_on_this_machine_alone() -> None:
    assert UiSettings().host == "127.0.0.1"


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 1}, {"port": 70000}, {"port": -1}])
def test_invalid_settings_of_the_page(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        UiSettings(**wrong)
