"""Options that commands share, and options built from settings classes."""

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
from typing import Annotated, Any, ClassVar, Literal

import typer

from hf_spec.cli.command import GENERAL
from hf_spec.common.errors import OptionError
from hf_spec.common.files import check_regular
from hf_spec.common.settings import Count, Named, Setting, Settings, Share, Within, setting_fields

# Strategy on a command line, parsed by `hf_spec.methods.entries`.
ENTRY = "NAME[:OPTION=JSON,...][@ASSISTANT]"


@dataclass(frozen=True)
class Placement(Settings):
    """Dtype and device of the target, see `hf_spec.cli.loading`.

    Attributes:
        dtype: dtype; auto: float32 on a CPU, otherwise the checkpoint's.
        device: device, e.g. cuda:1. Default: GPU, or CPU.
    """

    panel = GENERAL

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: str | None = None


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """Settings of generation.

    Attributes:
        strategy: NAME[:OPTION=JSON,...][@ASSISTANT], such as lookup, falcon@HEAD or
            tree:max_nodes=24@DRAFT.
        max_new_tokens: maximum new tokens.
        sample: sample instead of greedy decoding.
        temperature: temperature (with --do-sample). Default: the model's.
        top_p: top-p mass, 0 to 1 (with --do-sample). Default: the model's.
        seed: random seed (with --do-sample).
    """

    panel = "Generation"
    other_panels: ClassVar = {"Strategy": ("strategy",)}

    strategy: str = "auto"
    max_new_tokens: Count = 256
    sample: Annotated[bool, Named("do_sample")] = False
    temperature: Annotated[float | None, Within(0.01)] = None
    top_p: Share | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        values = {"--temperature": self.temperature, "--top-p": self.top_p, "--seed": self.seed}
        unused = [name for name, value in values.items() if value is not None]
        if unused and not self.sample:
            raise typer.BadParameter(
                f"{unused[0]} has no effect on greedy decoding; add --do-sample"
            )

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling arguments of `generate()`."""
        values = {"temperature": self.temperature, "top_p": self.top_p}
        changes = {name: value for name, value in values.items() if value is not None}
        return {"do_sample": self.sample, **changes}


@dataclass(frozen=True)
class UiSettings(Settings):
    """Settings of the page of `hf-spec ui`.

    Attributes:
        max_new_tokens: maximum new tokens; the page has a slider for fewer.
        host: address to listen on; 0.0.0.0 is reachable from other machines, without
            authentication.
        port: port to listen on; 0 selects a free port.
    """

    panel = "Page"

    max_new_tokens: Annotated[int, Within(2)] = 128
    host: str = "127.0.0.1"
    port: Annotated[int, Within(0, 65535)] = 7860


def _check_model_name(name: str | None) -> str | None:
    """Return a valid model name; raises the errors of `hf_spec.common.hub.check_name`."""
    # Imports huggingface_hub, which takes a moment.
    from hf_spec.common.hub import check_name

    if name is not None:
        check_name(name)
    return name


ModelArgument = Annotated[
    str, typer.Argument(help="Target model, folder or Hub id.", callback=_check_model_name)
]
OtherModel = Annotated[
    str | None,
    typer.Option("--model", help="Another model, folder or Hub id.", callback=_check_model_name),
]
# Arguments of an option that names an existing file.
FILE: Any = {"exists": True, "dir_okay": False}
STRATEGY_HELP = f"{ENTRY}, without spaces; may be repeated."
Strategies = Annotated[list[str] | None, typer.Option(help=STRATEGY_HELP)]
Assistants = Annotated[
    list[str] | None,
    typer.Option(
        help="Adapter or draft model of strategies that name none: folder, Hub id, or truncated:N "
        "for the target's first N layers; may be repeated."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        **FILE,
        help="JSON lines with id, task and turns (.jsonl), or text with one prompt per line. "
        "Default: the prompts of this package.",
    ),
]
PER_TASK_HELP = "Prompts per task. Default: {}, or all of a file."


def prompts_per_task(given: int | None, file: Path | None, default: int) -> int | None:
    """Return the limit of prompts per task: `default` without a file; all of a file are used."""
    return default if given is None and file is None else given


Out = Annotated[Path | None, typer.Option(help="JSON file of the results.")]


def check_out(path: Path | None, *sources: Path | None) -> None:
    """Raise `OptionError` if an output file cannot be written or is one of the inputs."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise OptionError(f"--out {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise OptionError(f"--out {path} is a folder; use a file name")
    check_regular(path)
    if path.exists() and any(source is not None and path.samefile(source) for source in sources):
        raise OptionError(f"--out {path} is the input file; choose another")


def from_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each `Settings` parameter of a command by one option per setting.

    Defaults come from the parameter's default or the class, help texts from the class docstring.
    The command receives the settings object:

        @app.command()
        @from_settings
        def search(*, model: ModelArgument, settings: SearchSettings) -> None: ...

    A tuple is set by repeating its option. 0 sets an optional setting with a default to None.
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
        settings = {name: _with_values(default, values) for name, default in groups.items()}
        others = {name: value for name, value in values.items() if name in signature.parameters}
        command(**others, **settings)

    # typer builds its options from these.
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = signature.replace(parameters=parameters)
    return run


def _options(defaults: Settings) -> Iterator[tuple[Setting, Any]]:
    """Yield the settings that are options, including nested ones, with their defaults."""
    for setting in setting_fields(type(defaults)):
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
    # A switch that is off by default has no negated name.
    names = [f"--{name.replace('_', '-')}"] if default is False else []
    option = typer.Option(*names, **limits, help=text, rich_help_panel=setting.panel)
    return Parameter(
        name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option]
    )


def _with_values(defaults: Settings, values: Mapping[str, Any]) -> Any:
    """Return the settings with the values of options."""
    changes: dict[str, Any] = {}
    for setting in setting_fields(type(defaults)):
        default = getattr(defaults, setting.name)
        if isinstance(default, Settings):
            changes[setting.name] = _with_values(default, values)
        elif setting.option is not None:
            value = values[setting.option]
            if setting.repeated:
                value = tuple(value) if value else default
            none = setting.optional and default is not None and not value
            changes[setting.name] = None if none else value
    return replace(defaults, **changes)
