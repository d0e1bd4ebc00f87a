"""`--config FILE`: options of a command from a YAML file, overridden by the command line.

Keys are option names without leading dashes (`max-new-tokens` or `max_new_tokens`), or argument
names in lower case. Values are those of the command line: a list for a repeated option, true or
false for a switch.
"""

from __future__ import annotations

from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from typer.main import get_command

from hf_spec.common.errors import OptionError
from hf_spec.common.files import read_text

# Options whose names here do not resemble those of other tools.
OTHER_NAMES: Final = {
    "epochs": "num-train-epochs",
    "accumulate": "gradient-accumulation-steps",
    "evaluate-every": "eval-steps",
    "vocabulary": "vocab-size",
    "max-batch": "max-num-seqs",
    "max-length": "max-model-len",
    "longest": "max-draft-tokens",
    "client-templates": "trust-request-chat-template",
}


def add_config_option(command: Any) -> None:
    """Add `--config` to a command."""
    # Let typer build the option from a signature.
    app = typer.Typer(add_completion=False)
    app.command()(_with_config)
    command.params.append(get_command(app).params[0])


def read_defaults(path: Path, command: Any) -> dict[str, str | list[str]]:
    """Return the values of a file by parameter name, as strings like on the command line.

    A file that is not a table of valid keys and values raises `typer.BadParameter`.
    """
    try:
        content = yaml.safe_load(read_text(path))
    except (OSError, OptionError, yaml.YAMLError, RecursionError) as error:
        raise typer.BadParameter(f"{path} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise typer.BadParameter(f"{path} must be a table of `option: value` lines")
    valid = _parameters(command)
    defaults = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in valid:
            near = " or ".join(suggestions(name, command))
            choice = f"did you mean {near}?" if near else f"it has {', '.join(sorted(valid))}"
            raise typer.BadParameter(f"{path}: {command.name} has no option {str(key)!r}; {choice}")
        if value is not None:
            defaults[valid[name].name] = _as_typed(path, key, value, valid[name])
    return defaults


def suggestions(name: str, command: Any) -> list[str]:
    """Return the options and arguments of a command that an unknown option may mean."""
    valid, other = _parameters(command), OTHER_NAMES.get(name)
    return [other] if other in valid else get_close_matches(name, valid)


def _parameters(command: Any) -> dict[str, Any]:
    """Return the parameters by their longest name, which is also their key in a file."""
    parameters = {max(p.opts, key=len).lstrip("-").replace("_", "-"): p for p in command.params}
    return {name: p for name, p in parameters.items() if name not in {"config", "help"}}


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
