"""Options that several commands have, and options made from settings, with one default each."""

# Imports neither torch nor transformers, see `hf_spec.common.settings`.

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from inspect import Parameter
from pathlib import Path
from types import GenericAlias
from typing import Annotated, Any, Literal

import typer

from hf_spec.common.errors import OptionError
from hf_spec.common.files import check_regular
from hf_spec.common.settings import Count, Setting, Settings, Share, Within, described

# How a command line names a strategy; `hf_spec.evaluation.bench.entries` reads it.
ENTRY = "NAME[:OPTION=JSON,...][@ASSISTANT]"


@dataclass(frozen=True)
class Placement(Settings):
    """How a target is loaded, see `hf_spec.cli.loading`.

    Attributes:
        dtype: of the target; auto: as it is stored, on a CPU float32.
        device: such as cpu or cuda:1; by default the GPU, or the CPU if there is none.
    """

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """How prompts are answered.

    Attributes:
        strategy: NAME[:OPTION=JSON,...][@ASSISTANT], such as lookup, falcon@HEAD or
            tree:max_nodes=24@DRAFT.
        max_new_tokens: longest output, in tokens.
        sample: draw from the model's distribution; greedy otherwise.
        temperature: of --sample; the model's own by default.
        top_p: of --sample: probability mass that is kept.
        seed: of --sample, to draw the same again.
    """

    strategy: str = "auto"
    max_new_tokens: Count = 256
    sample: bool = False
    temperature: Annotated[float | None, Within(0.01)] = None
    top_p: Share | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"--temperature": self.temperature, "--top-p": self.top_p, "--seed": self.seed}
        useless = [name for name, value in given.items() if value is not None]
        if useless and not self.sample:
            raise typer.BadParameter(f"{useless[0]} has no effect on greedy decoding; add --sample")

    @property
    def sampling(self) -> dict[str, Any]:
        """Arguments of `generate()`."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        chosen = {name: value for name, value in given.items() if value is not None}
        return {"do_sample": self.sample, **chosen}


def _named_model(name: str) -> str:
    # The Hub's own rules for names, whose import takes a moment, are needed only now.
    from hf_spec.common.hub import check_name

    check_name(name)
    return name


_MODEL_HELP = "The target model: folder or Hub id."
ModelArgument = Annotated[str, typer.Argument(help=_MODEL_HELP, callback=_named_model)]
ModelOption = Annotated[str, typer.Option(help=_MODEL_HELP, callback=_named_model)]
Assistants = Annotated[
    list[str] | None,
    typer.Option(
        help="For strategies that name none: folder or Hub id of an adapter or a draft model, or "
        "truncated:N, the target's own first N layers; repeated, a list (for auto)."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON lines with id, task and turns (.jsonl), or a text file with one prompt a line; "
        "the package's own by default.",
    ),
]
PerTask = Annotated[int, typer.Option(min=1, help="Prompts of each task.")]


def check_out(path: Path | None, *sources: Path | None) -> None:
    """Reject an output file that cannot be written, or that is read, before anything runs."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise OptionError(f"--out {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise OptionError(f"--out {path}: that is a folder, and a file is written")
    check_regular(path)
    if path.exists() and any(source is not None and path.samefile(source) for source in sources):
        raise OptionError(f"--out {path}: that is the file of prompts; choose another")


def from_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command, for each parameter that is a `Settings`, an option a setting.

    Defaults are those of the parameter's own default, or else of its class; the help is what the
    class says of its attributes. The command gets the settings whole:

        @app.command()
        @from_settings
        def search(*, model: ModelOption, settings: SearchSettings) -> None: ...

    A tuple is given by repeating its option. Where a setting that has a value may be None, 0 says
    so.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Settings] = {}
    parameters: list[Parameter] = []
    for name, parameter in signature.parameters.items():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, Settings):
            groups[name] = kind() if parameter.default is Parameter.empty else parameter.default
            parameters += [_parameter(*option) for option in _options(groups[name])]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        settings = {name: _filled(default, values) for name, default in groups.items()}
        own = {name: value for name, value in values.items() if name in signature.parameters}
        command(**own, **settings)

    # What typer makes its options from.
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return run


def _options(defaults: Settings) -> Iterator[tuple[Setting, Any]]:
    """The settings that are options, those of settings within settings too, with their defaults."""
    for setting in described(type(defaults)):
        default = getattr(defaults, setting.name)
        if isinstance(default, Settings):
            yield from _options(default)
        elif setting.option is not None:
            yield setting, default


def _parameter(setting: Setting, default: Any) -> Parameter:
    name, kind, limits = str(setting.option), setting.kind, dict[str, Any]()
    text = setting.help[:1].upper() + setting.help[1:]
    if setting.bounds is not None:
        bounds = {"min": setting.bounds.low, "max": setting.bounds.high}
        limits = {key: value for key, value in bounds.items() if value != math.inf}
    if setting.repeated:
        kind, default = GenericAlias(list, (kind,)), list(default) or None
        text = text.removesuffix(".") + "; may be repeated."
    elif setting.optional and default is not None:
        limits["min"], text = 0, text.replace("None", "0")
    # A switch that is off has no second name that turns it off, unless it is given one.
    names = [f"--{name.replace('_', '-')}"] if default is False else []
    if setting.off is not None:
        names = [f"{names[0]}/--{setting.off}"]
    option = typer.Option(*names, **limits, help=text)
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _filled(defaults: Settings, values: Mapping[str, Any]) -> Any:
    """The settings that the values of options say."""
    changes: dict[str, Any] = {}
    for setting in described(type(defaults)):
        default = getattr(defaults, setting.name)
        if isinstance(default, Settings):
            changes[setting.name] = _filled(default, values)
        elif setting.option is not None:
            value = values[setting.option]
            if setting.repeated:
                value = tuple(value) if value else default
            none = setting.optional and default is not None and not value
            changes[setting.name] = None if none else value
    return replace(defaults, **changes)
