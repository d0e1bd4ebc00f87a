"""Conversation of `hf-spec chat`: messages, statistics and /commands."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_spec.cli.answer.console_streamer import ACCEPTED_STYLE, ConsoleStreamer
from hf_spec.cli.answer.legend import legend
from hf_spec.cli.answer.responder import Responder
from hf_spec.common.errors import SpecError
from hf_spec.common.files import write_json
from hf_spec.common.outputs import SpecStats

PROMPT = "[bold]>[/] "


class Conversation:
    """Messages and statistics of a conversation; the docstrings of commands are shown by /help."""

    def __init__(self, responder: Responder, console: Console, system: str | None = None):
        self.responder = responder
        self.console = console
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)
        self._stats: list[SpecStats] = []
        self._ended = False
        self.commands: dict[str, Callable[[str], None]] = {
            "/stats": self.show_stats,
            "/strategy": self.set_strategy,
            "/reset": self.reset,
            "/save": self.save,
            "/help": self.help,
            "/exit": self.exit,
        }

    def run(self) -> None:
        """Read and answer lines until /exit or the end of the input."""
        self.responder.encode([*self._start, {"role": "user", "content": "hello"}])
        self.console.print(
            f"{escape(self.responder.entry.name)}; /help lists the commands", style="dim"
        )
        while not self._ended:
            try:
                line = self.console.input(PROMPT).strip()
            except EOFError:
                self.console.print()
                return
            if line:
                self._handle(line)

    def _handle(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        try:
            if not line.startswith("/"):
                self.answer(line)
            elif name in self.commands:
                self.commands[name](argument.strip())
            else:
                names = ", ".join(self.commands)
                self.console.print(f"unknown command {escape(name)}; known: {names}")
        except (SpecError, OSError) as error:
            self.console.print(f"[bold red]error:[/] {escape(str(error))}")

    def answer(self, text: str) -> None:
        """Send `text` to the model and print the answer; Ctrl-C stops it."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.responder.encode(messages)
        streamer = ConsoleStreamer(self.responder.tokenizer, self.console, ACCEPTED_STYLE)
        try:
            output: Any = self.responder.generate(ids, streamer)
        except KeyboardInterrupt:
            self.console.print(" [dim](stopped)", end="")
        else:
            self._stats.append(output.spec_stats)
        self.console.print()
        self.messages = [*messages, {"role": "assistant", "content": streamer.text}]

    def show_stats(self, _: str) -> None:
        """Show the statistics of the last answer and of all."""
        if not self._stats:
            self.console.print("no answers yet")
            return
        total = sum(self._stats, SpecStats([]))
        shown = f"last answer:\n{self._stats[-1]}\n\nall:\n{total}\n\n{legend(total)}"
        self.console.print(shown, markup=False)

    def set_strategy(self, entry: str) -> None:
        """NAME[@ASSISTANT]: switch to another strategy."""
        if entry:
            self.responder.set_strategy(entry)
        self.console.print(f"strategy {escape(self.responder.entry.name)}", style="dim")

    def reset(self, _: str) -> None:
        """Clear the conversation and its statistics."""
        self.messages = list(self._start)
        self._stats.clear()
        self.console.print("cleared", style="dim")

    def save(self, path: str) -> None:
        """FILE: save the conversation as JSON."""
        # pathlib's expanduser raises RuntimeError without a home folder.
        file = Path(os.path.expanduser(path))
        if not path or file.is_dir():
            self.console.print("/save needs a file name")
            return
        write_json(file, self.messages, ensure_ascii=False)
        self.console.print(f"saved {len(self.messages)} messages to {escape(path)}", style="dim")

    def help(self, _: str) -> None:
        """Show this list."""
        for name, method in self.commands.items():
            summary = str(inspect.getdoc(method)).splitlines()[0]
            self.console.print(f"{name:10} {escape(summary)}")
        self.console.print("accepted draft tokens are", f"[{ACCEPTED_STYLE}]this color")

    def exit(self, _: str) -> None:
        """End the chat, like Ctrl-D."""
        self._ended = True
