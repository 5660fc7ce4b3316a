"""Options of models, strategies and backends: frozen dataclasses, whose fields a scenario may set."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, TypeVar, cast, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

#: shows a value that is wrong, in part where it is long
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120

#: the largest whole number that an option may be, beyond which sums of bytes would overflow; and what is
#: gone through one by one may be less; programs' buckets of gradients are larger, and no sum's factor
LARGEST = 2**24
LARGEST_OF = {"layers": 2**12, "bucket_size": 2**31, "bucket_elements": 2**31}
#: the least that a whole number may be, where its default does not say
_MAY_BE_NONE = "experts", "shared_inner", "dense_layers", "router_groups", "router_group_topk", "mtp_layers"
LEAST_OF = dict.fromkeys(("expert_pattern", *_MAY_BE_NONE), 0)
#: numbers that are the share of what is dropped; that are above 0; and that are at least 0
PROBABILITIES = ("dropout", "attention_dropout", "lora_dropout")
POSITIVE = ("capacity", "lora_alpha", "norm_epsilon", "rotary_base", "router_scale", "window_rotary_base")
NOT_NEGATIVE = ("aux_weight", "logit_cap", "mtp_weight", "z_weight")
#: by an option, those that do nothing without it
WITHOUT: Mapping[str, Collection[str]] = {
    "experts": (
        "experts_per_token",
        "expert_inner",
        "shared_inner",
        "shared_gate",
        "dense_layers",
        "capacity",
    ),
    "shared_inner": ("shared_gate", "shared_overlap"),
    "lora_rank": ("lora_alpha", "lora_dropout"),
}


@dataclass(frozen=True)
class Saving:
    """A change of options that takes less memory.

    Attributes:
        options: the new values by name, of the options that say this.
        words: what it does.
    """

    options: Mapping[str, Any]
    words: str


@dataclass(frozen=True)
class Options:
    """What may be chosen about a strategy or a backend; this base: nothing."""

    def savings(self) -> Iterator[Saving]:
        """The changes that take less memory than these options do, the cheapest first."""
        yield from ()

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """The settings that a search for the fastest layout looks at, the most promising first; here the
        defaults alone.

        Args:
            heeded: what the model's attention heeds beside a causal mask: "documents", "window".
        """
        yield {}


def wrong_values(defaults: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with values of the fields of a frozen dataclass: their types, and the bounds of numbers,
    as (name, message). A field of whole numbers has a count of something, and of none only where that is the
    default; a field of others may be given a whole number too.

    Args:
        defaults: the dataclass with its defaults.
        given: of its fields alone.
    """
    adapters = _adapters(cast(Hashable, type(defaults)))
    for name, value in given.items():
        try:
            adapters[name].validate_python(value, strict=True)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]["msg"].replace("Input should", "must")
            yield name, f"{problem}, not {_REPR.repr(value)}"
            continue
        least = LEAST_OF.get(name, 0 if getattr(defaults, name) == 0 else 1)
        most, counts = (
            LARGEST_OF.get(name, LARGEST),
            "float" not in _hints(cast(Hashable, type(defaults)))[name],
        )
        for number in value if isinstance(value, list | tuple) else [value]:
            if counts and type(number) is int and not least <= number <= most:
                bound = f"at least {least}" if number < least else f"at most {most}"
                yield name, f"must be {bound}, not {number}"
            elif type(number) in (int, float) and not counts and (bound := _unmet(name, number)):
                yield name, f"must be {bound}, not {number}"


def _unmet(name: str, number: float) -> str:
    """The bound of an option that a number does not meet; "" if there is none."""
    if name in PROBABILITIES and not 0 <= number < 1:
        return "a probability, from 0 to below 1"
    if name in POSITIVE and number <= 0:
        return "above 0"
    return "at least 0" if name in NOT_NEGATIVE and number < 0 else ""


def values_without_effect(options: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Options that are given, and do nothing as another is off, as (name, message)."""
    for needed, names in WITHOUT.items():
        if not getattr(options, needed, True):
            for name in (each for each in names if given.get(each)):
                yield name, f"does nothing without {needed}; set that, or leave {name} out"


@cache
def _hints(options: Any) -> Mapping[str, str]:
    """The types of the fields of a dataclass, in words."""
    return {name: str(hint) for name, hint in get_type_hints(options).items()}


@cache
def _adapters(options: Any) -> Mapping[str, TypeAdapter[Any]]:
    """What checks the value of each field of a dataclass; kept, as evaluating annotations takes long."""
    hints = get_type_hints(options)
    config = ConfigDict(allow_inf_nan=False)
    return {f.name: TypeAdapter(hints[f.name], config=config) for f in fields(options)}


def check_choices(options: object, choices: Mapping[str, Iterable[str]]) -> None:
    """Check fields that are words.

    Args:
        choices: what may be chosen, by field.

    Raises:
        ValueError: a field has another value.
    """
    for name, known in choices.items():
        if (value := getattr(options, name)) not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def with_options(options: T, changed: Mapping[str, Any]) -> T:
    """A frozen dataclass with those of some options changed that it has."""
    names = {f.name for f in fields(options)}  # type: ignore[arg-type]
    return replace(options, **{k: v for k, v in changed.items() if k in names})  # type: ignore[type-var]


def set_options(defaults: T, given: Mapping[str, Any] | None, owner: str) -> T:
    """A frozen dataclass with some of its fields changed.

    Args:
        owner: whose options they are, for messages.

    Raises:
        KeyError: there is no such field; with those that there are.
        ValueError: the dataclass refuses a value.
    """
    allowed = [f.name for f in fields(defaults)]  # type: ignore[arg-type]
    for name in given or {}:
        if name not in allowed:
            raise KeyError(f"{owner} has no option {name!r}; it has: {', '.join(allowed) or 'none'}")
    return replace(defaults, **(given or {}))  # type: ignore[type-var]
