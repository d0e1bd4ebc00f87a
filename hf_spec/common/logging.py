"""Log messages that appear once per process."""

from __future__ import annotations

from functools import cache
from logging import Logger


@cache
def log_once(logger: Logger, level: int, message: str) -> None:
    """Log a message unless it was logged before with the same logger and level."""
    logger.log(level, message)
