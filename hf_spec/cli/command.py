"""Sub-command with a compact `--help` and suggestions for other names of its options.

typer's own help has a column each for names, negated names, types and texts, which leaves ten
characters for the texts at 80 columns.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any, ClassVar, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from hf_spec.cli.config_file import add_config_option, suggestions

# Panel of the options that every command has; shown last.
GENERAL: Final = "General"
# Panels of options that several commands define.
PANELS: Final = {
    GENERAL: ("config", "help"),
    "Strategy": ("strategy", "assistant"),
    "Prompts": ("prompt_file", "prompts", "whole", "per_task", "task", "chat_template"),
    "Output": ("out", "batch_size", "stats", "as_json", "as_markdown", "plots"),
}
# click's class, from the version that typer uses.
USAGE_ERROR: Any = typer.BadParameter.__mro__[1]
# Below this width, texts are printed under the names of their options.
NARROW: Final = 60
LONGEST_LABEL: Final = 30


class Command(TyperCommand):
    """Command whose options are grouped by their `rich_help_panel` or by `PANELS`."""

    panels: ClassVar = {name: title for title, names in PANELS.items() for name in names}
    other_panels: ClassVar = {"argument": "Arguments", "option": "Options"}

    def __init__(self, *arguments: Any, **settings: Any):
        super().__init__(*arguments, **settings)
        add_config_option(self)

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        # With it, generate() accepts `spec_strategy`.
        importlib.import_module("hf_spec.public")
        return super().invoke(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Parse arguments; the error for an unknown option suggests the right one."""
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            if hasattr(error, "possibilities"):
                near = suggestions(error.option_name.lstrip("-"), self)
                arguments = {p.name for p in self.params if p.param_type_name == "argument"}
                found = [name.upper() if name in arguments else f"--{name}" for name in near]
                if error.option_name.startswith("--no-"):
                    switches = [p for p in self.params if p.secondary_opts]
                    negated = {switch.opts[-1]: switch.secondary_opts[0] for switch in switches}
                    found = [negated.get(name, name) for name in found]
                error.possibilities = found
            raise

    def get_usage(self, ctx: Any) -> str:
        """Return the line of usage."""
        arguments = [_label(p, ctx) for p in self.params if p.param_type_name == "argument"]
        return " ".join(["Usage:", ctx.command_path, "[OPTIONS]", *arguments])

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help."""
        console = Console(highlight=False)
        panels: dict[str, list[Any]] = {}
        parameters: list[Any] = self.get_params(ctx)
        for parameter in parameters:
            by_name = self.panels.get(parameter.name, self.other_panels[parameter.param_type_name])
            panels.setdefault(parameter.rich_help_panel or by_name, []).append(parameter)
        console.print(self.get_usage(ctx), markup=False, style="bold")
        console.print()
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            lines = paragraph if paragraph.startswith("    ") else " ".join(paragraph.split())
            console.print(Text(lines.replace("`", "")), Text(), sep="\n")
        general = panels.pop(GENERAL)
        for title, group in [*panels.items(), (GENERAL, general)]:
            rows = [(_label(p, ctx), _text(p, ctx)) for p in group]
            console.print(Panel(_drawn(rows, console.width), title=title, title_align="left"))


def _label(parameter: Any, ctx: Any) -> str:
    """Return the names of an option with the kind of its value, or the name of an argument."""
    if parameter.param_type_name == "argument":
        name = parameter.name.upper()
        return name if parameter.required else f"[{name}]"
    names = parameter.opts[-1]
    if parameter.secondary_opts:
        negated = parameter.secondary_opts[0]
        is_plain = negated == names.replace("--", "--no-", 1)
        names = names.replace("--", "--[no-]", 1) if is_plain else f"{names}/{negated}"
    kind = parameter.get_help_record(ctx)[0].partition(" <")[2].rstrip(">")
    if "|" not in kind:
        kind = kind.removesuffix(" range").removeprefix("list[").rstrip("]").upper()
    return f"{names} {kind}".rstrip()


def _text(parameter: Any, ctx: Any) -> Text:
    """Return the help of a parameter with its default."""
    notes = re.search(r"\[default: ([^;\]]+)", parameter.get_help_record(ctx)[1])
    text = Text(parameter.help.replace("`", ""))
    if notes is not None:
        is_on = f"--{notes[1]}" in parameter.opts
        text.append(f" [default: {'on' if is_on else notes[1]}]", "dim")
    if parameter.required and parameter.param_type_name == "option":
        text.append(" [required]", "red")
    return text


def _drawn(rows: list[tuple[str, Text]], width: int) -> RenderableType:
    if width < NARROW:
        return Group(
            *(part for label, text in rows for part in (Text(label, "cyan"), Padding(text, (0, 2))))
        )
    table = Table.grid(padding=(0, 2, 0, 0))
    # Longer labels continue on a second line.
    words = [[label] if len(label) <= LONGEST_LABEL else label.split() for label, _ in rows]
    table.add_column(style="cyan", width=max(len(word) for line in words for word in line))
    table.add_column()
    for label, text in rows:
        table.add_row(Text(label), text)
    return table
