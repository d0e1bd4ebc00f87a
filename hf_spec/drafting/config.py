"""Configs of strategies: frozen dataclasses that validate their values."""

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

# Value of `max_nodes`: the cost model chooses how many nodes are sent.
AUTO = "auto"
# Options that only some length policies read -> these policies.
POLICIES_WITH = {
    "confidence_threshold": ("confidence", HEAD),
    "adapter": ("disco",),
    "acceptance_threshold": ("disco",),
}


@dataclass(frozen=True)
class StrategyConfig:
    """Options of every strategy. All fields are JSON values, so configs can be stored.

    Attributes:
        strategy: the registered name, set by `register`.
        needs_assistant: True if the strategy requires `assistant=` or an adapter attached to the
            model.
        adapter_methods: methods of supported adapters; None for all.
        sizes: options that set the size of a draft.
        takes_tokenizers: True if the draft model may have another tokenizer than the target.
        batching: which parts of a batch are padded: "unpadded" for none; for comparison
            "unpadded_kv", "unpadded_input" and "padded" (see
            `hf_spec.engine.forward.padded_batching`).
        compile: whether to compile the layers of target and drafter for this call.
            Default: the setting of `hf_spec.compile` for each model.
    """

    strategy: ClassVar[str] = ""
    needs_assistant: ClassVar[bool] = False
    adapter_methods: ClassVar[tuple[str, ...] | None] = ()
    sizes: ClassVar[tuple[str, ...]] = ()
    takes_tokenizers: ClassVar[bool] = False

    batching: str = field(default="unpadded", kw_only=True)
    compile: bool | None = field(default=None, kw_only=True)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Raise `OptionError` for unknown options; the message lists the known ones."""
        fields = sorted(option.name for option in dataclasses.fields(cls))
        if unknown := sorted(set(options) - set(fields)):
            raise OptionError(
                f"{cls.__name__} has no option {', '.join(unknown)}; {choices(unknown[0], fields)}"
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.batching not in list(BATCHING):
            raise OptionError(
                f"{type(self).__name__}(batching={self.batching!r}) is unsupported; "
                f"{choices(self.batching, BATCHING)}"
            )
        if self.compile is not None:
            self.check_flags("compile")

    @property
    def leaves_sizes_open(self) -> bool:
        """True if no size of the draft is configured, so the cost model may choose it."""
        options = type(self).__dataclass_fields__
        return all(getattr(self, name) == options[name].default for name in self.sizes)

    def for_short_texts(self) -> Self:
        """Return the config for texts of a few tokens, in which drafts that pay may be rare.

        It differs if the sizes of drafts follow from times: they are fixed, or drafts are cheap.
        """
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the options and the strategy's name as JSON values."""
        return {"strategy": self.strategy, **dataclasses.asdict(self)}

    def check_flags(self, *names: str) -> None:
        """Raise `OptionError` for options that are neither a bool nor the default."""
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, bool) and value is not getattr(type(self), name):
                raise OptionError(f"{name}={value!r} must be True or False")

    def check(self, name: str, low: float, high: float = math.inf) -> None:
        """Raise `OptionError` if a number is outside [low, high] or not of the declared type.

        None is accepted if the type allows it, and "auto" if it is the default.
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
class AssistantConfig(StrategyConfig):
    """Options of strategies whose assistant may be a whole model.

    Attributes:
        assistant_bits: 4 to draft with 4-bit weights (NF4 of bitsandbytes), quantized at the first
            call. The target keeps its own.
        draft_vocab_size: number of tokens that can be drafted: the first of the vocabulary, and
            those that end a text. Default: all. The target still chooses among all tokens.
    """

    assistant_bits: int | None = field(default=None, kw_only=True)
    draft_vocab_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.assistant_bits not in (None, 4):
            raise OptionError(f"assistant_bits={self.assistant_bits!r} must be 4 or None")
        self.check("draft_vocab_size", 1)


def shared_options(config: AssistantConfig) -> dict[str, Any]:
    """Return the options that `auto` passes on to drafts of a model."""
    names = ("batching", "assistant_bits", "draft_vocab_size")
    return {name: getattr(config, name) for name in names}


@dataclass(frozen=True)
class PolicyConfig(StrategyConfig):
    """Options of drafts whose length follows from a length policy.

    Attributes:
        max_draft_tokens: most tokens drafted in a round (levels, for a tree). The "heuristic"
            policy starts there and may exceed it. Default: the adapter's value for the "disco"
            policy, `longest` for "measured", `usual` for others.
        min_draft_tokens: tokens that are drafted before the policy applies.
        length_policy: "measured" (see `hf_spec.drafting.cost_model`), "static", "heuristic",
            "confidence", for heads with a confidence head "head" (see
            `hf_spec.drafting.length_policy`), or "disco" (see `hf_spec.methods.disco`). Default:
            "measured" if no size of the draft is configured, else "static".
        usual: default sizes for policies with fixed sizes.
        longest: default sizes as bounds, for the "measured" policy and `max_nodes="auto"`.
        has_confidence_head: True if drafters may have one, for the "head" policy.
        confidence_threshold: probability below which the "confidence" and "head" policies stop.
        adapter: folder or Hub id of the classifier, for the "disco" policy.
        acceptance_threshold: probability below which the "disco" policy stops. Default: the
            adapter's value.
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
        for name in {"max_draft_tokens", *self.usual}:
            self.check(name, 1)
        if self.length_policy is not None:
            check_policy(self.length_policy)
        if self.length_policy == HEAD and not self.has_confidence_head:
            raise OptionError(
                f"length_policy={HEAD!r} needs a confidence head, which drafters of "
                f"{type(self).__name__} do not have; use 'confidence'"
            )
        self.check("min_draft_tokens", 1)
        self.check("confidence_threshold", 0, 1)
        self.check("acceptance_threshold", 0, 1)
        if not isinstance(self.adapter, (str, type(None))):
            raise OptionError(f"adapter={self.adapter!r} must be a string: a folder or a Hub id")
        self._check_used()

    def _check_used(self) -> None:
        """Raise `OptionError` for options that the policy or the longest draft rule out."""
        for name, policies in POLICIES_WITH.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.length_policy not in policies:
                raise OptionError(
                    f"{name}={value!r} is not used by length_policy={self.length_policy!r}; leave "
                    f"it out, or use length_policy={policies[0]!r}"
                )
        if self.max_draft_tokens is not None and self.min_draft_tokens > self.max_draft_tokens:
            raise OptionError(
                f"min_draft_tokens={self.min_draft_tokens} is larger than max_draft_tokens="
                f"{self.max_draft_tokens}; lower it, or use length_policy='static' for drafts of "
                "one length"
            )

    @property
    def selects_nodes_by_cost(self) -> bool:
        """True if the cost model chooses the nodes of a tree to send."""
        return getattr(self, "max_nodes", None) == AUTO

    def for_short_texts(self) -> Self:
        """Return the config with fixed sizes, see `StrategyConfig`."""
        return self.resolve(measures=False)

    def resolve(self, measures: bool) -> Self:
        """Return the config with policy and sizes filled in, by measured times if `measures`."""
        adaptive = measures and self.leaves_sizes_open
        policy = self.length_policy or (MEASURED if adaptive else "static")
        sizes: dict[str, Any] = dict(self.longest if policy == MEASURED else self.usual)
        if policy == "disco":
            sizes.pop("max_draft_tokens", None)
        if "max_draft_tokens" in sizes:
            sizes["max_draft_tokens"] = max(sizes["max_draft_tokens"], self.min_draft_tokens)
        if measures and self.selects_nodes_by_cost and "max_nodes" in sizes:
            sizes["max_nodes"] = self.longest["max_nodes"]
        unset = {name: n for name, n in sizes.items() if getattr(self, name) in (None, AUTO)}
        return dataclasses.replace(self, length_policy=policy, **unset)
