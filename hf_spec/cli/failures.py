"""How a command ends that cannot do what it was asked: one sentence, and a status.

0 done, 1 failed, 2 wrong usage, 130 stopped by Ctrl-C. Errors that say what is wrong with the
user's files, names or values are `ValueError`s (all of `hf_spec`'s are) and `OSError`s; any other
exception is a mistake in the code and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

FAILED = 1
WRONG_USAGE = 2
INTERRUPTED = 130

# Set to 1, it shows tracebacks, as --debug does.
DEBUG_VARIABLE = "HF_SPEC_DEBUG"


@contextmanager
def in_one_sentence(debug: bool = False) -> Iterator[None]:
    """Turn an error into its message on standard error and an exit status.

    Args:
        debug: let it through instead.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        # The reader of a pipe that went away is typer's business.
        if debug or isinstance(error, BrokenPipeError):
            raise
        # Its class, not a message, tells a wrong option from a failure; where it was raised the
        # package is imported already.
        from hf_spec.errors import OptionError

        status = WRONG_USAGE if isinstance(error, OptionError) else FAILED
        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red"), Text(str(error) or type(error).__name__), sep=""
        )
        raise typer.Exit(status) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(INTERRUPTED) from stop
