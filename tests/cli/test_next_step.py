"""Commands to copy."""

from __future__ import annotations

from pathlib import Path

from hf_spec.cli.next_step import bench_command, next_command


def test_words_are_quoted() -> None:
    line = next_command("train", "falcon", "--out", Path("my heads/a"))
    assert line == "hf-spec train falcon --out 'my heads/a'"


def test_dtype_and_device_go_along() -> None:
    line = bench_command("org/model", "falcon@head", "bfloat16", "cuda:1")
    assert line == (
        "hf-spec bench org/model --strategy falcon@head --dtype bfloat16 --device cuda:1"
    )
    assert bench_command("m", "none", "auto", None) == "hf-spec bench m --strategy none"
