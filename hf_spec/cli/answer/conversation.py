"""A conversation with a model: what is said, what is remembered, and the /commands."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hf_spec.cli.answer.console_streamer import ACCEPTED_STYLE, ConsoleStreamer
from hf_spec.cli.answer.speaker import Speaker
from hf_spec.common.errors import SpecError
from hf_spec.common.files import write_json
from hf_spec.common.outputs import SpecStats

PROMPT = "[bold]>[/] "


class Conversation:
    """Messages, answers and what they cost; `system` is a message before the others."""

    def __init__(self, speaker: Speaker, console: Console, system: str | None = None):
        self.speaker = speaker
        self.console = console
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)
        self._answers: list[SpecStats] = []
        self._going = True
        self.commands: dict[str, Callable[[str], None]] = {
            "/stats": self.show_stats,
            "/strategy": self.choose,
            "/reset": self.reset,
            "/save": self.save,
            "/help": self.help,
            "/exit": self.exit,
        }

    def run(self) -> None:
        """Read and answer lines until /exit or the end of the input."""
        self.speaker.encode([*self._start, {"role": "user", "content": "hello"}])
        self.console.print(
            f"{escape(self.speaker.entry.name)}; /help lists the commands", style="dim"
        )
        while self._going:
            try:
                line = self.console.input(PROMPT).strip()
            except EOFError:
                self.console.print()
                return
            if line:
                self._obey_or_answer(line)

    def _obey_or_answer(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        try:
            if not line.startswith("/"):
                self.answer(line)
            elif name in self.commands:
                self.commands[name](argument.strip())
            else:
                known = ", ".join(self.commands)
                self.console.print(f"unknown command {escape(name)}; known: {known}")
        except (SpecError, OSError) as error:
            self.console.print(f"[bold red]error:[/] {escape(str(error))}")

    def answer(self, text: str) -> None:
        """Say `text` to the model and print what it answers; Ctrl-C cuts the answer short."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.speaker.encode(messages)
        streamer = ConsoleStreamer(self.speaker.tokenizer, self.console, ACCEPTED_STYLE)
        try:
            output: Any = self.speaker.generate(ids, streamer)
        except KeyboardInterrupt:
            self.console.print(" [dim](stopped)", end="")
        else:
            self._answers.append(output.spec_stats)
        self.console.print()
        self.messages = [*messages, {"role": "assistant", "content": streamer.text}]

    def show_stats(self, _: str) -> None:
        """What speculation brought to the last answer and to all."""
        if not self._answers:
            self.console.print("nothing has been answered yet")
            return
        together = sum(self._answers, SpecStats([]))
        self.console.print(f"last answer:\n{self._answers[-1]}\n\nall:\n{together}", markup=False)

    def choose(self, entry: str) -> None:
        """NAME[@ASSISTANT]: draft in another way from now on."""
        if entry:
            self.speaker.choose(entry)
        self.console.print(f"strategy {escape(self.speaker.entry.name)}", style="dim")

    def reset(self, _: str) -> None:
        """Forget the conversation and its statistics."""
        self.messages = list(self._start)
        self._answers.clear()
        self.console.print("forgotten", style="dim")

    def save(self, path: str) -> None:
        """FILE: write the conversation as JSON."""
        # Not pathlib's, which raises RuntimeError where there is no home folder.
        file = Path(os.path.expanduser(path))
        if not path or file.is_dir():
            self.console.print("/save needs the name of a file")
            return
        write_json(file, self.messages, ensure_ascii=False)
        self.console.print(f"{len(self.messages)} messages in {escape(path)}", style="dim")

    def help(self, _: str) -> None:
        """This list."""
        for name, method in self.commands.items():
            summary = str(inspect.getdoc(method)).splitlines()[0]
            self.console.print(f"{name:10} {escape(summary)}")
        self.console.print("accepted draft tokens are", f"[{ACCEPTED_STYLE}]this colour")

    def exit(self, _: str) -> None:
        """End; so does Ctrl-D."""
        self._going = False
