"""Settings: dataclasses that define the default, bounds and help of every option.

Command line options are built from the field types, the defaults, and the `Attributes` of the
docstring (`hf_spec.cli.options`).
"""

# `--help` must not import torch. So modules with settings import neither torch nor transformers.

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from hf_spec.common.errors import OptionError


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each number in a tuple; `exclude_low` excludes the lower one."""

    low: float
    high: float = math.inf
    exclude_low: bool = False

    def __contains__(self, number: float) -> bool:
        above = self.low < number if self.exclude_low else self.low <= number
        return above and number <= self.high

    def __str__(self) -> str:
        if self.exclude_low:
            upper = f" and at most {self.high}" if self.high < math.inf else ""
            return f"above {self.low}{upper}"
        if self.high < math.inf:
            return f"between {self.low} and {self.high}"
        return f"of at least {self.low}"


@dataclass(frozen=True)
class Named:
    """Option name on the command line, if not the field name."""

    option: str


CODE_ONLY = object()

Value = TypeVar("Value")
# Setting without a command line option.
Internal = Annotated[Value, CODE_ONLY]
Count = Annotated[int, Within(1)]
Share = Annotated[float, Within(0, 1)]
Weight = Annotated[float, Within(0)]
PositiveShare = Annotated[float, Within(0, 1, exclude_low=True)]
PositiveWeight = Annotated[float, Within(0, exclude_low=True)]


@dataclass(frozen=True)
class Setting:
    """Field of a settings class.

    Attributes:
        name: field name.
        option: command line option with underscores, or None.
        kind: type of the value, or of the elements of a tuple.
        help: first sentence of its text in the docstring, and the one on its default.
        panel: title of its group in a help text.
        choices: allowed values, empty for any.
        repeated: the value is a tuple.
        optional: the value may be None.
    """

    name: str
    option: str | None
    kind: Any
    help: str
    panel: str
    choices: tuple[Any, ...]
    bounds: Within | None
    repeated: bool
    optional: bool

    def check(self, value: Any) -> None:
        """Raise `OptionError` for a value that the type or the bounds do not allow."""
        if value is None and self.optional:
            return
        wrong = f"{self.name}={value!r}"
        if self.choices and value not in self.choices:
            raise OptionError(f"{wrong}: choose one of {', '.join(self.choices)}")
        if self.kind is bool and type(value) is not bool:
            raise OptionError(f"{wrong} must be True or False")
        if self.kind not in (int, float):
            return
        allowed = (int,) if self.kind is int else (int, float)
        bounds = self.bounds or Within(-math.inf)
        for number in value if self.repeated else (value,):
            is_number = isinstance(number, allowed) and not isinstance(number, bool)
            if not is_number or number not in bounds:
                kind = "a whole number" if self.kind is int else "a number"
                raise OptionError(f"{wrong} must be {kind}{f' {bounds}' if self.bounds else ''}")


@dataclass(frozen=True)
class Settings:
    """Base class of settings; raises `OptionError` for invalid values.

    Attributes:
        panel: title of the group of their options in a help text.
        other_panels: title -> names of fields in other groups.
    """

    panel: ClassVar[str] = "Options"
    other_panels: ClassVar[dict[str, tuple[str, ...]]] = {}

    def __post_init__(self) -> None:
        for setting in setting_fields(type(self)):
            setting.check(getattr(self, setting.name))


def setting_fields(kind: type[Settings]) -> tuple[Setting, ...]:
    """Return the fields of a settings class in order, inherited ones last."""
    hints, texts = get_type_hints(kind, include_extras=True), _attributes(kind)
    panels = {name: title for title, names in kind.other_panels.items() for name in names}
    settings = []
    definers = {
        name: depth
        for depth, base in reversed(list(enumerate(kind.__mro__)))
        for name in inspect.get_annotations(base)
    }
    for field in sorted(dataclasses.fields(kind), key=lambda field: definers[field.name]):
        hint, notes = hints[field.name], list[Any]()
        repeated = optional = False
        while origin := get_origin(hint):
            if origin is Annotated:
                notes += hint.__metadata__
                hint = hint.__origin__
            elif origin in (Union, types.UnionType):
                optional = True
                [hint] = [inner for inner in get_args(hint) if inner is not type(None)]
            elif origin is tuple:
                repeated = True
                hint = get_args(hint)[0]
            else:
                break
        named = next((note for note in notes if isinstance(note, Named)), Named(field.name))
        settings.append(
            Setting(
                name=field.name,
                option=None if CODE_ONLY in notes else named.option,
                kind=hint,
                help=_short(texts.get(field.name, "")),
                panel=panels.get(field.name, kind.panel),
                choices=get_args(hint) if get_origin(hint) is Literal else (),
                bounds=next((note for note in notes if isinstance(note, Within)), None),
                repeated=repeated,
                optional=optional,
            )
        )
    return tuple(settings)


def _short(text: str) -> str:
    """Return the first sentence of a text, and the one that starts with "Default:"."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", text)
    return " ".join([first, *(other for other in others if other.startswith("Default:"))])


def _attributes(kind: type[Settings]) -> dict[str, str]:
    """Return the texts of the `Attributes` sections of a class and its bases by name."""
    texts: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
        # Entries are indented by four spaces, continuation lines by more.
        for entry in re.split(r"\n?^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
            names, _, text = entry.partition(": ")
            texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts
