"""Options of strategies: frozen dataclasses that check their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.length_policy import HEAD, MEASURED, check_policy
from hf_spec.engine.forward.padded_batching import BATCHING

if TYPE_CHECKING:
    from typing_extensions import Self

# Of the number of nodes sent: as many as are worth their time.
AUTO = "auto"


@dataclass(frozen=True)
class StrategyConfig:
    """Options of a strategy. Every field is a plain JSON value, so configs can be stored.

    Attributes:
        strategy: the registered name, set by `register`.
        needs_assistant: whether `assistant=` must be given, or an adapter attached to the model.
        adapter_methods: of the adapters that it can use; None for all.
        sizes: options that say how large a draft is.
        takes_tokenizers: whether its draft model may have a tokenizer of its own.
        batching: what is padded in a batch: "unpadded", which is nothing; for comparison
            "unpadded_kv", "unpadded_input" and "padded" (see
            `hf_spec.engine.forward.padded_batching`).
        compile: True compiles the layers of the target and of what drafts for this call, on a CPU;
            False runs them uncompiled. By default `hf_spec.compile` of each model decides.
    """

    strategy: ClassVar[str] = ""
    needs_assistant: ClassVar[bool] = False
    adapter_methods: ClassVar[tuple[str, ...] | None] = ()
    sizes: ClassVar[tuple[str, ...]] = ()
    takes_tokenizers: ClassVar[bool] = False

    batching: str = field(default="unpadded", kw_only=True)
    compile: bool | None = field(default=None, kw_only=True)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse options that the config does not have, with the names of those it has."""
        fields = sorted(option.name for option in dataclasses.fields(cls))
        if unknown := sorted(set(options) - set(fields)):
            raise OptionError(
                f"{cls.__name__} has no option {', '.join(unknown)}; {choices(unknown[0], fields)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.batching not in list(BATCHING):
            raise OptionError(
                f"{type(self).__name__}(batching={self.batching!r}) is no way of batching; "
                f"{choices(self.batching, BATCHING)}"
            )
        if self.compile is not None:
            self.check_flags("compile")

    @property
    def leaves_sizes_open(self) -> bool:
        """Whether no size of the draft is given, so that it may follow from measured times."""
        options = type(self).__dataclass_fields__
        return all(getattr(self, name) == options[name].default for name in self.sizes)

    def to_dict(self) -> dict[str, Any]:
        """The options and the strategy's name, as JSON values."""
        return {"strategy": self.strategy, **dataclasses.asdict(self)}

    def check_flags(self, *names: str) -> None:
        """Refuse options that are neither True nor False nor left out (`OptionError`)."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool) and value is not getattr(type(self), name):
                raise OptionError(f"{name}={value!r} must be True or False")

    def check(self, name: str, low: float, high: float = math.inf) -> None:
        """Refuse a number outside [low, high] or of another type than declared (`OptionError`).

        None passes where the type allows it, and a word that is the default.
        """
        option = type(self).__dataclass_fields__[name]
        value, declared = getattr(self, name), str(option.type)
        if (value is None and "None" in declared) or (value == option.default == AUTO):
            return
        whole = "float" not in declared
        numeric = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not numeric or not low <= value <= high:
            kind = "a whole number" if whole else "a number"
            limits = f"of at least {low}" if high == math.inf else f"between {low} and {high}"
            limits += f", or {AUTO!r}" if option.default == AUTO else ""
            raise OptionError(
                f"{type(self).__name__}({name}={value!r}): {name} must be {kind} {limits}"
            )


@dataclass(frozen=True)
class PolicyConfig(StrategyConfig):
    """Options of drafts whose length a policy decides.

    Attributes:
        max_draft_tokens: most tokens drafted in a round (levels, for a tree); where the "heuristic"
            policy starts, which may go beyond it. None is the adapter's, for the "disco" policy,
            and the usual number for others (`usual`; `longest` for "measured").
        min_draft_tokens: so many are drafted before a policy is asked.
        length_policy: "measured" (see `hf_spec.drafting.cost_model.cost_model_drafter`), "static",
        "heuristic",
            "confidence", of heads with a confidence head "head" (see
            `hf_spec.drafting.length_policy`), or "disco" (see `hf_spec.methods.disco.drafter`).
            None is "measured" where no size of the draft is given, and "static" where one is.
        usual: sizes of drafts that are not given, for policies with fixed sizes.
        longest: the same as bounds, for the "measured" policy and nodes that are weighed.
        has_confidence_head: whether drafters may have one, for the "head" policy.
        confidence_threshold: probability below which the "confidence" and "head" policies stop.
        adapter: folder or Hub id of the classifier, for the "disco" policy.
        acceptance_threshold: below which the "disco" policy stops; None is the adapter's.
    """

    needs_assistant = True
    sizes: ClassVar[tuple[str, ...]] = ("max_draft_tokens",)

    usual: ClassVar[Mapping[str, int]] = MappingProxyType({"max_draft_tokens": 5})
    longest: ClassVar[Mapping[str, int]] = MappingProxyType({"max_draft_tokens": 16})
    has_confidence_head: ClassVar[bool] = False

    max_draft_tokens: int | None = None
    min_draft_tokens: int = 1
    length_policy: str | None = None
    confidence_threshold: float = 0.4
    adapter: str | None = None
    acceptance_threshold: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.usual:
            self.check(name, 1)
        if self.length_policy is not None:
            check_policy(self.length_policy)
        if self.length_policy == HEAD and not self.has_confidence_head:
            raise OptionError(
                f"length_policy={HEAD!r} asks a confidence head, which drafters of "
                f"{type(self).__name__} do not have; choose 'confidence'"
            )
        self.check("min_draft_tokens", 1)
        self.check("confidence_threshold", 0, 1)
        self.check("acceptance_threshold", 0, 1)
        if not isinstance(self.adapter, (str, type(None))):
            raise OptionError(f"adapter={self.adapter!r} must be a string: a folder or a Hub id")
        if self.adapter is not None and self.length_policy != "disco":
            raise OptionError(
                f"adapter={self.adapter!r} is not used by length_policy={self.length_policy!r}; "
                "leave it out, or choose length_policy='disco'"
            )

    @property
    def selects_nodes_by_cost(self) -> bool:
        """Whether as many nodes of a tree are sent as are worth their time."""
        return getattr(self, "max_nodes", None) == AUTO

    def resolve(self, measures: bool) -> Self:
        """The same with a length policy and sizes; `measures` says whether times may decide."""
        measured = measures and self.leaves_sizes_open
        policy = self.length_policy or (MEASURED if measured else "static")
        sizes: dict[str, Any] = dict(self.longest if policy == MEASURED else self.usual)
        if policy == "disco":
            sizes.pop("max_draft_tokens", None)
        if measures and self.selects_nodes_by_cost and "max_nodes" in sizes:
            sizes["max_nodes"] = self.longest["max_nodes"]
        sizes = {name: n for name, n in sizes.items() if getattr(self, name) in (None, AUTO)}
        return dataclasses.replace(self, length_policy=policy, **sizes)
