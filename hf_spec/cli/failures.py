"""How a command ends that cannot do what it was asked: one sentence, and a status.

0 done, 1 failed, 2 the caller's mistake, 3 nothing proven (`hf-spec verify`), 130 stopped by
Ctrl-C. A wrong name, option, value, file or assistant is the caller's mistake; a model that cannot
be served, a Hub that does not answer or a full disk is a failure. Errors that say what is wrong are
`ValueError`s (all of `hf_spec`'s are) and `OSError`s; any other exception is a mistake in the code
and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

from hf_spec.common.errors import AssistantError, HubError, OptionError

FAILED = 1
WRONG_USAGE = 2
UNPROVEN = 3
INTERRUPTED = 130

CALLERS_MISTAKES = (
    OptionError,
    AssistantError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)

# Set to 1, it shows tracebacks, as --debug does.
DEBUG_VARIABLE = "HF_SPEC_DEBUG"


@contextmanager
def in_one_sentence(debug: bool = False) -> Iterator[None]:
    """Turn an error into one sentence on standard error and a status, unless `debug` is set."""
    try:
        yield
    except (ValueError, OSError) as error:
        # The reader of a pipe that went away is typer's business.
        if debug or isinstance(error, BrokenPipeError):
            raise
        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red"), Text(str(error) or type(error).__name__), sep=""
        )
        mistake = isinstance(error, CALLERS_MISTAKES) and not isinstance(error, HubError)
        raise typer.Exit(WRONG_USAGE if mistake else FAILED) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(INTERRUPTED) from stop
