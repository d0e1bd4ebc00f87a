"""Messages are logged once per logger and level."""

from __future__ import annotations

import logging

import pytest

from hf_spec.common.logging import log_once


def test_each_message_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log_once.cache_clear()
    one, other = logging.getLogger("hf_spec.one"), logging.getLogger("hf_spec.other")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            log_once(one, logging.INFO, "100% of a")
            log_once(one, logging.WARNING, "100% of a")
            log_once(other, logging.INFO, "100% of a")
            log_once(one, logging.INFO, "b")
    assert [(r.name, r.levelname, r.getMessage()) for r in caplog.records] == [
        ("hf_spec.one", "INFO", "100% of a"),
        ("hf_spec.one", "WARNING", "100% of a"),
        ("hf_spec.other", "INFO", "100% of a"),
        ("hf_spec.one", "INFO", "b"),
    ]
