"""Sub-commands of `hf-spec`, each imported when it is called.

The module of a sub-command defines its options and imports everything else when it runs, so that
`--help` and errors about options do not import torch or transformers.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
import platform
from collections.abc import Callable
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hf_spec.cli.command import Command
from hf_spec.cli.config_file import add_config_option
from hf_spec.cli.failures import DEBUG_VARIABLE, exit_with_message
from hf_spec.common.installing import VERSION

# Packages whose versions a bug report needs.
REPORTED_PACKAGES: Final = ("torch", "transformers", "huggingface_hub", "peft")

# Wraps paragraphs; indented examples and brackets are kept.
MARKUP: Final = "markdown"


# Name -> (module and attribute, first line of the help, which needs no import). The attribute is a
# function with typer's annotations, or a `typer.Typer` with several.
COMMANDS = {
    "generate": ("hf_spec.cli.answer.generate:generate", "Continue or answer a prompt."),
    "chat": ("hf_spec.cli.answer.chat:chat", "Chat with a model in the terminal."),
    "serve": (
        "hf_spec.cli.serve:serve",
        "Serve a model with a strategy through an OpenAI-compatible API.",
    ),
    "train": (
        "hf_spec.cli.train.app:train",
        "Train draft models, draft heads and adaptive tokens.",
    ),
    "calibrate": (
        "hf_spec.cli.train.calibrate:calibrate",
        "Tune a trained adapter to this machine.",
    ),
    "verify": (
        "hf_spec.cli.verify:verify",
        "Verify on your model and prompts that a strategy does not change the output.",
    ),
    "bench": (
        "hf_spec.cli.bench:bench",
        "Benchmark strategies against plain generate() and other implementations.",
    ),
    "check-head": (
        "hf_spec.cli.check_head:check_head",
        "Find the layout of a published head that fits; a wrong one only drafts worse.",
    ),
    "import-head": (
        "hf_spec.cli.import_head:import_head",
        "Convert a published head from pickle to safetensors.",
    ),
    "export": (
        "hf_spec.cli.export:export",
        "Write an EAGLE-3 head in the layout of vLLM or SGLang.",
    ),
    "shrink": ("hf_spec.cli.shrink:shrink", "Store an adapter in 8 or 4 bits."),
    "card": ("hf_spec.cli.card:card", "Write the model card of an adapter."),
    "push": ("hf_spec.cli.push:push", "Upload an adapter to the Hugging Face Hub."),
    "ui": (
        "hf_spec.cli.ui.command:ui",
        "Compare plain and speculative output in the browser and inspect the drafts.",
    ),
    "demo": (
        "hf_spec.cli.demo.command:demo",
        "Compare plain and speculative generation of a small real model on four prompts.",
    ),
}


def build_app() -> typer.Typer:
    """Return the typer application with every sub-command."""
    app = typer.Typer(cls=_RootGroup, rich_markup_mode=MARKUP, no_args_is_help=True)

    @app.callback()
    def root(
        debug: Annotated[
            bool,
            typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show the traceback of an error."),
        ] = False,
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_print_versions, is_eager=True, help="Show versions."
            ),
        ] = False,
    ) -> None:
        """Lossless speculative decoding inside Hugging Face generate().

        Every command also reads options from a YAML file: --config FILE. Exit status: 0 success,
        1 failure, 2 invalid usage, 3 not proven (verify), 130 interrupted by Ctrl-C.

            hf-spec demo
            hf-spec generate MODEL "Why is the sky blue?" --stats
            hf-spec chat MODEL --strategy falcon@HEAD
        """

    return app


def load_command(name: str) -> Any:
    """Import a sub-command, and add `--config` to it and its sub-commands."""
    attribute = pkgutil.resolve_name(COMMANDS[name][0])
    app = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    if isinstance(attribute, typer.Typer):
        app.add_typer(attribute, name=name)
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
    else:
        app.command(name, cls=Command)(attribute)
        command = get_command(app)
    for leaf in getattr(command, "commands", {"": command}).values():
        add_config_option(leaf)
        leaf.callback = _after_import(leaf.callback)
    return command


def _after_import(work: Callable[..., Any]) -> Callable[..., Any]:
    """Import `hf_spec.public` when the command runs, so that generate() accepts `spec_strategy`."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("hf_spec.public")
        return work(*args, **kwargs)

    return run


def _print_versions(requested: bool) -> None:
    if not requested:
        return
    installed = {d.name for d in importlib.metadata.distributions()}
    names = [name for name in REPORTED_PACKAGES if name in installed]
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    typer.echo(f"hf-spec {VERSION} ({', '.join(versions)}, Python {platform.python_version()})")
    raise typer.Exit


class _RootGroup(TyperGroup):
    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        # Placeholders for help and completion.
        self.commands = {
            name: TyperCommand(name, help=summary) for name, (_, summary) in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = load_command(name)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        with exit_with_message(debug=ctx.params["debug"]):
            return super().invoke(ctx)
