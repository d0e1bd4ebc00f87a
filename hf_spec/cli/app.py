"""The sub-commands of `hf-spec`, each imported when it is called.

A sub-command's module holds its options and imports what it works with when it runs, so that its
help, and the answer to a wrong option, wait for neither torch nor transformers.
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

from hf_spec.cli.config_file import add_config_option
from hf_spec.cli.failures import DEBUG_VARIABLE, in_one_sentence
from hf_spec.common.installing import VERSION

# Beside our own version, those that a report of a problem needs.
NAMED_WITH_VERSION: Final = ("torch", "transformers", "huggingface_hub", "peft")

# Paragraphs are wrapped, indented examples and brackets stay as they are.
MARKUP: Final = "markdown"


# Name -> module and attribute, a function with typer's annotations or a `typer.Typer` with several,
# and the first line of its help, known without the import.
COMMANDS = {
    "generate": ("hf_spec.cli.answer.generate:generate", "Continue or answer a prompt."),
    "chat": ("hf_spec.cli.answer.chat:chat", "Talk with a model in the terminal."),
    "serve": (
        "hf_spec.cli.serve:serve",
        "Answer requests of OpenAI's API with transformers' own handlers, speculatively.",
    ),
    "train": ("hf_spec.cli.train.app:train", "Train the parts that strategies need."),
    "calibrate": ("hf_spec.cli.train.calibrate:calibrate", "Choose options by measured speed."),
    "verify": (
        "hf_spec.cli.verify:verify",
        "Prove on your own model and prompts that a strategy leaves the output as it is.",
    ),
    "bench": (
        "hf_spec.cli.bench:bench",
        "Measure strategies against plain generate() and what others offer, on your own prompts.",
    ),
    "check-head": (
        "hf_spec.cli.check_head:check_head",
        "Find the reading of a published head that fits: a wrong one only drafts worse.",
    ),
    "import-head": (
        "hf_spec.cli.import_head:import_head",
        "Convert a published head that lies on the Hub as a pickle to safetensors.",
    ),
    "export": (
        "hf_spec.cli.export:export",
        "Write an EAGLE-3 head in the layout that vLLM or SGLang reads.",
    ),
    "shrink": ("hf_spec.cli.shrink:shrink", "Store an adapter in 8 or 4 bits."),
    "card": ("hf_spec.cli.card:card", "Write the model card of an adapter."),
    "push": ("hf_spec.cli.push:push", "Put an adapter on the Hugging Face Hub."),
    "ui": (
        "hf_spec.cli.ui.command:ui",
        "Compare plain and speculative answers on a page in the browser, and look at the drafts.",
    ),
    "demo": (
        "hf_spec.cli.demo.command:demo",
        "Answer four prompts plainly and speculatively with a small real model, and compare.",
    ),
}


def build_app() -> typer.Typer:
    """Return the typer application with every sub-command."""
    app = typer.Typer(cls=_RootGroup, rich_markup_mode=MARKUP, no_args_is_help=True)

    @app.callback()
    def root(
        debug: Annotated[
            bool,
            typer.Option(
                "--debug", envvar=DEBUG_VARIABLE, help="Show where in the code an error arose."
            ),
        ] = False,
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=_say_versions, is_eager=True, help="Say which versions run."
            ),
        ] = False,
    ) -> None:
        """Lossless speculative decoding inside Hugging Face generate().

        Every command takes its options from a YAML file too: --config FILE. Status: 0 done,
        1 failed, 2 your call is wrong, 3 nothing proven (verify), 130 stopped by Ctrl-C.

            hf-spec demo
            hf-spec generate MODEL "Why is the sky blue?" --stats
            hf-spec chat MODEL --strategy falcon@HEAD
        """

    return app


def load_command(name: str) -> Any:
    """Import a sub-command; it takes `--config`, as does whatever is below it."""
    found = pkgutil.resolve_name(COMMANDS[name][0])
    app = typer.Typer(add_completion=False, rich_markup_mode=MARKUP)
    if isinstance(found, typer.Typer):
        app.add_typer(found, name=name)
        command = get_command(app).commands[name]  # type: ignore[attr-defined]
    else:
        app.command(name)(found)
        command = get_command(app)
    for one in getattr(command, "commands", {"": command}).values():
        add_config_option(one)
        one.callback = _after_import(one.callback)
    return command


def _after_import(work: Callable[..., Any]) -> Callable[..., Any]:
    """Before a command does its work, generate() learns `spec_strategy`; help does without."""

    @functools.wraps(work)
    def run(*args: Any, **kwargs: Any) -> Any:
        importlib.import_module("hf_spec.public")
        return work(*args, **kwargs)

    return run


def _say_versions(asked: bool) -> None:
    if not asked:
        return
    installed = {d.name for d in importlib.metadata.distributions()}
    found = [f"{n} {importlib.metadata.version(n)}" for n in NAMED_WITH_VERSION if n in installed]
    typer.echo(f"hf-spec {VERSION} ({', '.join(found)}, Python {platform.python_version()})")
    raise typer.Exit


class _RootGroup(TyperGroup):
    def __init__(self, **attributes: Any):
        super().__init__(**attributes)
        # In help and completion these stand for the sub-commands, until one is called.
        self.commands = {
            name: TyperCommand(name, help=said) for name, (_, said) in COMMANDS.items()
        }

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            command = load_command(name)
        return name, command, rest

    def invoke(self, ctx: Any) -> Any:
        with in_one_sentence(debug=ctx.params["debug"]):
            return super().invoke(ctx)
