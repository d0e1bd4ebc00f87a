"""The `hf-spec` command. Its sub-commands live in modules of their own and are put together here.

The core package stays light: typer and rich come with the `demo` extra, and without them the
command says so.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

NEEDED_PACKAGES = ("typer", "rich")


def main() -> None:
    """Run the command line; exits with the status of the chosen sub-command."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"hf-spec needs {' and '.join(missing)}, which the demo extra installs: "
            'pip install "hf-spec[demo]"'
        )
    build_app()()


def build_app() -> typer.Typer:
    """Return the typer application with every sub-command."""
    import typer

    from hf_spec.bench.verify_cli import verify
    from hf_spec.demo import demo
    from hf_spec.training.cli import train
    from hf_spec.training.cli_calibrate import calibrate

    app = typer.Typer(add_completion=False, no_args_is_help=True)
    app.command()(demo)
    app.command()(verify)
    app.add_typer(train, name="train")
    app.add_typer(calibrate, name="calibrate")

    # Without a callback typer would turn a lone sub-command into the command itself.
    @app.callback()
    def root() -> None:
        """Lossless speculative decoding inside Hugging Face generate()."""

    return app
