"""Generate the command table and help texts of docs/command-line.md from the command line itself.

`python docs/command_line.py` writes the blocks between `<!-- commands: NAME -->` and
`<!-- end -->`; tests/test_docs.py checks that they are current.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from hf_spec.cli.app import COMMANDS, build_app, load_command
from hf_spec.common.tables import Table

PAGE = Path(__file__).parent / "command-line.md"
COLUMNS = 80
BLOCK = re.compile(r"(?<=<!-- commands: )(\w+) -->\n.*?(?=<!-- end -->)", re.S)


def commands() -> dict[str, Any]:
    """Return a dictionary of all commands without subcommands, by name."""
    leaves = {}
    for name in COMMANDS:
        command = load_command(name)
        below = getattr(command, "commands", None)
        leaves |= {name: command} if below is None else {f"{name} {n}": c for n, c in below.items()}
    return leaves


def table() -> str:
    """Return a Markdown table with the first line of each help text."""
    rows = [
        (f"[`hf-spec {name}`](#hf-spec-{name.replace(' ', '-')})", command.help.splitlines()[0])
        for name, command in commands().items()
    ]
    return Table(("command", "purpose"), rows).markdown()


def helps() -> str:
    """Return the help text of each command under a heading."""
    sections = []
    plain = {"COLUMNS": str(COLUMNS), "FORCE_COLOR": None, "TTY_COMPATIBLE": None}
    for name in commands():
        words = [*name.split(), "--help"]
        result = CliRunner(env=plain).invoke(build_app(), words, prog_name="hf-spec")
        text = "\n".join(line.rstrip() for line in result.output.strip().splitlines())
        sections.append(f"### `hf-spec {name}`\n\n```text\n{text}\n```")
    return "\n\n".join(sections)


def written(text: str) -> str:
    """Return the page with regenerated blocks."""
    made = {"table": table, "helps": helps}
    return BLOCK.sub(lambda block: f"{block[1]} -->\n{made[block[1]]()}\n", text)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
