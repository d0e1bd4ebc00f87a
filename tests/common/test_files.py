"""Atomic writes, which replace old contents and leave nothing after a failure; reading lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from hf_spec.common.errors import OptionError
from hf_spec.common.files import (
    atomic_write,
    check_regular,
    complete_lines,
    parse_json_lines,
    read_text,
    resume_lines,
    write_json,
)

Write = Callable[[Path, str], None]


def write_file(path: Path, text: str) -> None:
    path.write_text(text)


def write_folder(path: Path, text: str) -> None:
    path.mkdir()
    (path / text).touch()


def content(path: Path) -> str:
    return path.read_text() if path.is_file() else " ".join(p.name for p in path.iterdir())


@pytest.mark.parametrize("write", [write_file, write_folder])
class TestBoth:
    def test_it_appears_at_the_end(self, write: Write, tmp_path: Path) -> None:
        path = tmp_path / "result.json"
        with atomic_write(path) as part:
            write(part, "new")
            assert not path.exists()
        assert content(path) == "new"
        assert list(tmp_path.iterdir()) == [path]

    def test_it_replaces(self, write: Write, tmp_path: Path) -> None:
        path = tmp_path / "result"
        write(path, "old")
        write(tmp_path / "result.part", "of-a-run-that-was-killed")
        with atomic_write(path) as part:
            assert not part.exists()
            assert content(path) == "old"
            write(part, "new")
        assert content(path) == "new"
        assert list(tmp_path.iterdir()) == [path]

    def test_nothing_of_a_failure_is_left(self, write: Write, tmp_path: Path) -> None:
        path = tmp_path / "result"
        write(path, "old")

        def write_until_interrupted() -> None:
            with atomic_write(path) as part:
                write(part, "half")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            write_until_interrupted()
        assert content(path) == "old"
        assert list(tmp_path.iterdir()) == [path]


def test_a_body_that_writes_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "result").write_text("old")
    with pytest.raises(FileNotFoundError), atomic_write(tmp_path / "result"):
        pass
    assert content(tmp_path / "result") == "old"


def test_json_is_written_atomically(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    write_json(path, {"a": "é"})
    assert path.read_text() == '{\n "a": "\\u00e9"\n}'
    write_json(path, ["é"], indent=None, ensure_ascii=False)
    assert path.read_text(encoding="utf-8") == '["é"]'
    with pytest.raises(TypeError):
        write_json(path, object())
    assert [found.name for found in tmp_path.iterdir()] == ["result.json"]


def test_lines_of_a_killed_run_are_read_again(tmp_path: Path) -> None:
    path, head = tmp_path / "new" / "lines.jsonl", {"format": "x", "seed": 1}
    assert resume_lines(path, head) == []
    with path.open("a") as file:
        file.write('{"id": 1}\n{"id": 2}\n{"id"')
    assert resume_lines(path, head) == [{"id": 1}, {"id": 2}]
    assert path.read_text().endswith('{"id": 2}\n')
    with pytest.raises(OptionError, match=r"was made with seed=1 \(now 2\)"):
        resume_lines(path, {**head, "seed": 2})
    # The run was killed while writing the header line.
    path.write_text('{"format"')
    assert resume_lines(path, head) == []
    assert json.loads(path.read_text()) == head


@pytest.mark.parametrize(
    "content", ["my notes", "my notes\nof today\n", "[1]\n", "{}", "[" * 100_000 + "\n"]
)
def test_lines_of_something_else_are_kept(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(OptionError, match=r"notes\.txt has other contents; choose another file"):
        resume_lines(path, {"format": "x"})
    assert path.read_text() == content


@pytest.mark.parametrize(
    ("line", "reason"),
    [("[" * 100_000, "nested too deeply"), ("[1]", "not an object"), ("x", "not JSON")],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    path, head = tmp_path / "lines.jsonl", {"format": "x"}
    path.write_text(json.dumps(head) + f'\n{{"id": 1}}\n{line}\n')
    with pytest.raises(OptionError, match=rf"lines\.jsonl, line 3: {reason}.*remove the line"):
        complete_lines(path, head)


def test_only_a_newline_ends_a_line() -> None:
    text = '{"a": "x\u2028y\u2029\x85"}\n\n  \n{"b": 2}'
    assert list(parse_json_lines(text, "f")) == [
        (1, {"a": "x\u2028y\u2029\x85"}),
        (4, {"b": 2}),
    ]


def test_marks_and_line_ends_of_windows(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("\ufeffone\r\ntwo\rthree".encode())
    assert read_text(path) == "one\ntwo\rthree"


def test_special_files_are_named(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    cases = {tmp_path / "pipe": "a pipe", tmp_path: "a folder", Path("/dev/zero"): "a device"}
    for path, kind in cases.items():
        for read in (read_text, check_regular, partial(complete_lines, head={})):
            with pytest.raises(OptionError, match=f"{path} is {kind}; use a regular file"):
                read(path)
    check_regular(tmp_path / "missing")
    pipe = tmp_path / "pipe"
    with pytest.raises(OptionError, match="is a pipe"):
        write_json(pipe, {})
    assert pipe.is_fifo()


def test_a_text_of_another_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_bytes("né".encode("latin-1"))
    with pytest.raises(OptionError, match=r"prompt\.txt is not UTF-8 text .* save it as UTF-8"):
        read_text(path)
    path.write_text("né", encoding="utf-8")
    assert read_text(path) == "né"
