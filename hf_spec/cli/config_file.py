"""`--config FILE`: options of a command from a YAML file, overridden by the command line.

Keys are option names without leading dashes (`max-new-tokens` or `max_new_tokens`), or argument
names in lower case. Values are those of the command line: a list for a repeated option, true or
false for a switch.
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
    """Add `--config` to a command."""
    # Let typer build the option from a signature.
    app = typer.Typer(add_completion=False)
    app.command()(_with_config)
    command.params.append(get_command(app).params[0])


def read_defaults(path: Path, command: Any) -> dict[str, str | list[str]]:
    """Return the values of a file by parameter name, as strings like on the command line.

    Raises:
        typer.BadParameter: if the file is not a table of valid keys and values.
    """
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, OptionError, yaml.YAMLError, RecursionError) as error:
        raise typer.BadParameter(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must be a table of `option: value` lines")
    # The longest name of a parameter is its key in the file.
    parameters = {max(p.opts, key=len).lstrip("-").replace("_", "-"): p for p in command.params}
    valid = {name: p for name, p in parameters.items() if name not in {"config", "help"}}
    defaults = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in valid:
            near = " or ".join(difflib.get_close_matches(name, valid))
            choice = f"did you mean {near}?" if near else f"it has {', '.join(sorted(valid))}"
            raise typer.BadParameter(f"{path}: {command.name} has no option {str(key)!r}; {choice}")
        if value is not None:
            defaults[valid[name].name] = _as_typed(path, key, value, valid[name])
    return defaults


def _set_defaults(ctx: typer.Context, path: Path | None) -> None:
    if path is not None:
        ctx.default_map = read_defaults(path, ctx.command)


def _with_config(
    config: Annotated[
        Path | None,
        # Eager: defaults are needed before other values are parsed.
        typer.Option(
            help="YAML file with options of this command.",
            exists=True,
            dir_okay=False,
            is_eager=True,
            expose_value=False,
            callback=_set_defaults,
        ),
    ] = None,
) -> None: ...


def _as_typed(path: Path, key: Any, value: Any, parameter: Any) -> str | list[str]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, (dict, list)) or item is None for item in values):
        raise typer.BadParameter(f"{path}: {key} must be a single value or a list of them")
    texts = [str(item) for item in values]
    if getattr(parameter, "multiple", False):
        return texts
    if isinstance(value, list):
        raise typer.BadParameter(f"{path}: {key} takes one value, not a list")
    return texts[0]
