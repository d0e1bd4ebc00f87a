"""Settings: dataclasses that are the only place of a value's default, its bounds and its meaning.

Values are checked against the types of the fields. A command line makes its options from the same
types, from the defaults and from the `Attributes` of the docstring (`hf_spec.cli.options`).
"""

# Help must not wait for torch, so the classes that it is made from lie in modules that import
# neither torch nor transformers. Reading their source instead, without an import, would only do
# for defaults and types that are literals.

from __future__ import annotations

import dataclasses
import inspect
import math
import re
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from hf_spec.common.errors import OptionError


@dataclass(frozen=True)
class Within:
    """Bounds of a number, or of each in a tuple."""

    low: float
    high: float = math.inf


@dataclass(frozen=True)
class Named:
    """What a command line calls a setting, and a switch that is off, if not by the field's name."""

    option: str
    off: str | None = None


CODE_ONLY = object()

Value = TypeVar("Value")
# A setting that is no option of a command line.
Internal = Annotated[Value, CODE_ONLY]
Count = Annotated[int, Within(1)]
Share = Annotated[float, Within(0, 1)]
Weight = Annotated[float, Within(0)]


@dataclass(frozen=True)
class Setting:
    """A field of a settings class.

    Attributes:
        name: of the field.
        option: on a command line, with underscores; None if it has none.
        off: what turns a switch off, likewise.
        kind: type of the value, or of each in a tuple.
        help: what the docstring says of it.
        choices: if only these are allowed.
        bounds: of a number.
        repeated: whether the value is a tuple.
        optional: whether it may be None.
    """

    name: str
    option: str | None
    off: str | None
    kind: Any
    help: str
    choices: tuple[Any, ...]
    bounds: Within | None
    repeated: bool
    optional: bool

    def check(self, value: Any) -> None:
        """Refuse a value that the type or the bounds do not allow.

        Raises:
            OptionError: names the setting, the value and what is allowed.
        """
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
        low, high = (self.bounds.low, self.bounds.high) if self.bounds else (-math.inf, math.inf)
        for one in value if self.repeated else (value,):
            number = isinstance(one, allowed) and not isinstance(one, bool)
            if not number or not low <= one <= high:
                kind = "a whole number" if self.kind is int else "a number"
                limits = f" between {low} and {high}" if high < math.inf else f" of at least {low}"
                raise OptionError(f"{wrong} must be {kind}{limits if self.bounds else ''}")


@dataclass(frozen=True)
class Settings:
    """Base of settings; refuses values that the types of the fields do not allow."""

    def __post_init__(self) -> None:
        for setting in described(type(self)):
            setting.check(getattr(self, setting.name))


def described(kind: type[Settings]) -> tuple[Setting, ...]:
    """The fields of a settings class, in their order."""
    hints, texts = get_type_hints(kind, include_extras=True), _attributes(kind)
    found = []
    for field in dataclasses.fields(kind):
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
        called = next((note for note in notes if isinstance(note, Named)), Named(field.name))
        found.append(
            Setting(
                name=field.name,
                option=None if CODE_ONLY in notes else called.option,
                off=called.off,
                kind=hint,
                help=texts.get(field.name, ""),
                choices=get_args(hint) if get_origin(hint) is Literal else (),
                bounds=next((note for note in notes if isinstance(note, Within)), None),
                repeated=repeated,
                optional=optional,
            )
        )
    return tuple(found)


def _attributes(kind: type[Settings]) -> dict[str, str]:
    """What the `Attributes` section of a docstring says of each name."""
    section = (
        inspect.cleandoc(kind.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    )
    texts: dict[str, str] = {}
    # An entry begins at four spaces; deeper lines continue it.
    for entry in re.split(r"\n?^ {4}(?=\S)", section, flags=re.MULTILINE)[1:]:
        names, _, text = entry.partition(": ")
        texts |= dict.fromkeys(names.split(", "), " ".join(text.split()))
    return texts
