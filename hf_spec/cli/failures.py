"""Exit status and one-sentence error message of a failed command.

Status: 0 success, 1 failure, 2 invalid usage, 3 not proven (`hf-spec verify`), 130 interrupted by
Ctrl-C. An invalid name, option, value, file or assistant is invalid usage. An unsupported model, an
unreachable Hub or a full disk is a failure. Only `ValueError` (which includes all errors of
hf_spec) and `OSError` are turned into messages; other exceptions are bugs and keep their
traceback.
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

USAGE_ERRORS = (
    OptionError,
    AssistantError,
    FileNotFoundError,
    NotADirectoryError,
    IsADirectoryError,
    PermissionError,
)

# Environment variable of --debug.
DEBUG_VARIABLE = "HF_SPEC_DEBUG"


@contextmanager
def exit_with_message(debug: bool = False) -> Iterator[None]:
    """Turn an error into one sentence on standard error and an exit status, unless `debug`."""
    try:
        yield
    except (ValueError, OSError) as error:
        # typer handles a closed pipe.
        if debug or isinstance(error, BrokenPipeError):
            raise
        Console(stderr=True, soft_wrap=True).print(
            Text("error: ", style="bold red"), Text(str(error) or type(error).__name__), sep=""
        )
        is_usage = isinstance(error, USAGE_ERRORS) and not isinstance(error, HubError)
        raise typer.Exit(WRONG_USAGE if is_usage else FAILED) from error
    except KeyboardInterrupt as stop:
        raise typer.Exit(INTERRUPTED) from stop
