"""`--config FILE`: options of any command from a YAML file; the command line overrides them.

Keys are the names of options without the dashes before them (`max-new-tokens`, or
`max_new_tokens`), or of arguments in lower case; values are what would stand after the option: a
list for one that may be repeated, true or false for a switch.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.main import get_command

from hf_spec.common.errors import OptionError
from hf_spec.common.files import read_text


def add_config_option(command: Any) -> None:
    """Let a command take `--config`."""
    # The option as typer builds it from a signature.
    app = typer.Typer(add_completion=False)
    app.command()(_carrier)
    command.params.append(get_command(app).params[0])


def read_defaults(path: Path, command: Any) -> dict[str, str | list[str]]:
    """The values of a file for a command, by the name of its parameters, as a user would type them.

    Raises:
        typer.BadParameter: if the file is no table of known keys with values that fit.
    """
    try:
        found = yaml.safe_load(read_text(path))
    except (OSError, OptionError, yaml.YAMLError, RecursionError) as error:
        raise typer.BadParameter(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{path} must be a table of `option: value` lines")
    # By its longest name, as it stands in a file.
    names = {max(one.opts, key=len).lstrip("-").replace("_", "-"): one for one in command.params}
    known = {name: one for name, one in names.items() if name not in {"config", "help"}}
    defaults = {}
    for key, value in found.items():
        name = str(key).replace("_", "-")
        if name not in known:
            near = " or ".join(difflib.get_close_matches(name, known))
            choice = f"did you mean {near}?" if near else f"it has {', '.join(sorted(known))}"
            raise typer.BadParameter(f"{path}: {command.name} has no option {str(key)!r}; {choice}")
        if value is not None:
            defaults[known[name].name] = _as_typed(path, key, value, known[name])
    return defaults


def _take(ctx: typer.Context, path: Path | None) -> None:
    if path is not None:
        ctx.default_map = read_defaults(path, ctx.command)


def _carrier(
    config: Annotated[
        Path | None,
        # Eager: defaults must be known before any other value is looked up.
        typer.Option(
            help="YAML file with options of this command; the command line overrides them.",
            exists=True,
            dir_okay=False,
            is_eager=True,
            expose_value=False,
            callback=_take,
        ),
    ] = None,
) -> None: ...


def _as_typed(path: Path, key: Any, value: Any, parameter: Any) -> str | list[str]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, (dict, list)) or one is None for one in values):
        raise typer.BadParameter(f"{path}: {key} must be a single value or a list of them")
    texts = [str(one) for one in values]
    if getattr(parameter, "multiple", False):
        return texts
    if isinstance(value, list):
        raise typer.BadParameter(f"{path}: {key} takes one value, not a list")
    return texts[0]
