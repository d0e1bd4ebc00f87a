"""Options that say how a command generates, shared by those that do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_spec.cli.options import ENTRY

Strategy = Annotated[
    str,
    typer.Option(help=f"{ENTRY}, such as lookup, falcon@HEAD or tree:max_nodes=24@DRAFT."),
]
Assistants = Annotated[
    list[str] | None,
    typer.Option(
        help="For strategies that name none: folder or Hub id of an adapter or a draft model; "
        "repeated, a list (for auto)."
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="JSON lines with id, task and turns (.jsonl), or a text file with one prompt a line; "
        "the package's own by default.",
    ),
]
PerTask = Annotated[int, typer.Option(min=1, help="Prompts of each task.")]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest output, in tokens.")]
Sample = Annotated[
    bool, typer.Option("--sample", help="Draw from the model's distribution; greedy otherwise.")
]
Temperature = Annotated[
    float | None, typer.Option(min=0.01, help="Of --sample; the model's own by default.")
]
TopP = Annotated[
    float | None,
    typer.Option(min=0, max=1, help="Of --sample: probability mass that is kept."),
]
Seed = Annotated[int | None, typer.Option(help="Of --sample, to draw the same again.")]


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen.

    Attributes:
        sample: draw them; the likeliest otherwise.
        temperature, top_p: None leaves the model's own.
        seed: of the draws; None draws others every time.
    """

    sample: bool = False
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        given = {"--temperature": self.temperature, "--top-p": self.top_p, "--seed": self.seed}
        useless = [name for name, value in given.items() if value is not None]
        if useless and not self.sample:
            raise typer.BadParameter(f"{useless[0]} has no effect on greedy decoding; add --sample")

    def arguments(self) -> dict[str, Any]:
        """For `generate()`."""
        given = {"temperature": self.temperature, "top_p": self.top_p}
        return {
            "do_sample": self.sample,
            **{name: value for name, value in given.items() if value is not None},
        }
