"""Sub-commands of `hf-spec`, each imported when it is called.

The module of a sub-command defines its options and imports everything else when it runs, so that
`--help` and errors about options do not import torch or transformers.
"""

from __future__ import annotations

import importlib.metadata
import pkgutil
import platform
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from hf_spec.cli.command import Command
from hf_spec.cli.failures import DEBUG_VARIABLE, exit_with_message
from hf_spec.common.installing import VERSION

# Packages whose versions a bug report needs.
REPORTED_PACKAGES: Final = ("torch", "transformers", "huggingface_hub", "peft")

# Name -> (module and attribute, first line of the help, which needs no import). The attribute is a
# function with typer's annotations, or a `typer.Typer` with several.
COMMANDS = {
    "generate": ("answer.generate:generate", "Continue or answer a prompt."),
    "chat": ("answer.chat:chat", "Chat with a model in the terminal."),
    "serve": ("serve:serve", "Serve a model through an OpenAI-compatible API."),
    "train": ("train.app:train", "Train draft models, draft heads and adaptive tokens."),
    "calibrate": ("train.calibrate:calibrate", "Tune a trained adapter to this machine."),
    "verify": ("verify:verify", "Verify that a strategy does not change the output."),
    "bench": ("bench:bench", "Benchmark strategies against plain generate()."),
    "check-head": ("check_head:check_head", "Find the layout of a published head that fits."),
    "import-head": ("share:import_head", "Convert a published head from pickle to safetensors."),
    "export": ("share:export", "Write an EAGLE-3 head in the layout of vLLM or SGLang."),
    "shrink": ("share:shrink", "Store an adapter in 8 or 4 bits."),
    "card": ("share:card", "Write the model card of an adapter."),
    "push": ("share:push", "Upload an adapter to the Hugging Face Hub."),
    "ui": ("ui.command:ui", "Compare plain and speculative output in the browser."),
    "demo": ("demo.command:demo", "Compare plain and speculative output of a model."),
}


def build_app() -> typer.Typer:
    """Return the typer application with every sub-command."""
    app = typer.Typer(cls=_RootGroup, rich_markup_mode="markdown", no_args_is_help=True)

    @app.callback()
    def root(
        debug: Annotated[
            bool, typer.Option("--debug", envvar=DEBUG_VARIABLE, help="Show tracebacks.")
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
    """Import a sub-command."""
    attribute = pkgutil.resolve_name(f"hf_spec.cli.{COMMANDS[name][0]}")
    app = typer.Typer(add_completion=False)
    if isinstance(attribute, typer.Typer):
        app.add_typer(attribute, name=name)
        return get_command(app).commands[name]  # type: ignore[attr-defined]
    app.command(name, cls=Command)(attribute)
    return get_command(app)


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
