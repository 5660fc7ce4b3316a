"""Options of models, strategies and backends: frozen dataclasses, whose fields a scenario may set."""

import reprlib
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

T = TypeVar("T")

#: formats wrong values for messages, and shortens long ones
_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 120

#: the largest whole number of an option, beyond which sums of bytes would overflow; LARGEST_OF: less for
#: layers, which loops go through, and more for gradient buckets, which no sum multiplies
LARGEST = 2**24
LARGEST_OF = {"layers": 2**12, "bucket_size": 2**31}
#: numbers of elements by DeepSpeed's names, which users also set to 0, or to more than any model has
_ELEMENTS = (
    *("reduce_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size", "stage3_max_live_parameters"),
    *("stage3_max_reuse_distance", "stage3_param_persistence_threshold"),
)
LARGEST_OF |= dict.fromkeys(_ELEMENTS, 2**53)
#: the smallest whole number of an option, where its default does not tell
_MAY_BE_NONE = "experts", "shared_inner", "dense_layers", "router_groups", "router_group_topk", "mtp_layers"
LEAST_OF = dict.fromkeys(("expert_pattern", *_MAY_BE_NONE, *_ELEMENTS[1:]), 0)
#: options that are probabilities; options that are above 0; options that are at least 0
PROBABILITIES = ("dropout", "attention_dropout", "lora_dropout")
POSITIVE = ("capacity", "lora_alpha", "norm_epsilon", "rotary_base", "router_scale", "window_rotary_base")
NOT_NEGATIVE = ("aux_weight", "logit_cap", "mtp_weight", "z_weight")
#: for each option, the options that have no effect while it is off
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
        options: the new values, by the option's name.
        words: the effect of the change.
    """

    options: Mapping[str, Any]
    words: str


@dataclass(frozen=True)
class Options:
    """Options of a strategy or a backend; this base class has none."""

    #: the words that an option may be whose type is not a Literal of them, by the option's name
    words: ClassVar[Mapping[str, Collection[str]]] = {}

    def __post_init__(self) -> None:
        check_choices(self, _words(cast(Hashable, type(self))))

    def variants(self) -> Iterator[Mapping[str, Any]]:
        """Yields the changes of these options that verification tries too: each switch the other way, and
        each other word, one at a time. Classes add numbers that lead to other code, and words that are
        refused alone."""
        words = _words(cast(Hashable, type(self)))
        for name, value in vars(self).items():
            others = [not value] if isinstance(value, bool) else words.get(name, ())
            for changed in ({name: other} for other in others if other != value):
                with suppress(ValueError):
                    replace(self, **changed)
                    yield changed

    def savings(self) -> Iterator[Saving]:
        """Yields the changes that take less memory than these options, the cheapest first."""
        yield from ()

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yields the settings that a search for the fastest layout tries, the most promising first; by
        default only the defaults, {}. A strategy whose options yield none is not tried.

        Args:
            heeded: features of the model's attention in addition to a causal mask: "documents", "window".
        """
        yield {}


@cache
def _words(options: type[Options]) -> Mapping[str, Collection[str]]:
    """The words that each option of a class may be."""
    hints = get_type_hints(options).items()
    return {**{name: get_args(hint) for name, hint in hints if get_origin(hint) is Literal}, **options.words}


def wrong_values(defaults: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, message) for each wrong value of a frozen dataclass's fields: of another type, or out of
    bounds. A field of whole numbers is a count, which may be 0 only if 0 is the default; other fields accept
    whole numbers too.

    Args:
        defaults: an instance of the dataclass with its defaults.
        given: values by name, only of the dataclass's fields.
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
    """The bound that a number violates as the option ``name``; "" if it violates none."""
    if name in PROBABILITIES and not 0 <= number < 1:
        return "a probability, from 0 to below 1"
    if name in POSITIVE and number <= 0:
        return "above 0"
    return "at least 0" if name in NOT_NEGATIVE and number < 0 else ""


def values_without_effect(options: Any, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (name, message) for each given option that has no effect because another option is off."""
    for needed, names in WITHOUT.items():
        if not getattr(options, needed, True):
            for name in (each for each in names if given.get(each)):
                yield name, f"does nothing without {needed}; set that, or leave {name} out"


@cache
def _hints(options: Any) -> Mapping[str, str]:
    """The types of a dataclass's fields as texts, by name."""
    return {name: str(hint) for name, hint in get_type_hints(options).items()}


@cache
def _adapters(options: Any) -> Mapping[str, TypeAdapter[Any]]:
    """The validators of a dataclass's fields, by name; cached, because evaluating annotations takes long."""
    hints = get_type_hints(options)
    config = ConfigDict(allow_inf_nan=False)
    return {f.name: TypeAdapter(hints[f.name], config=config) for f in fields(options)}


def check_choices(options: object, choices: Mapping[str, Iterable[str]]) -> None:
    """Check that fields of options have one of some words.

    Args:
        choices: the words that each field may have, by its name.

    Raises:
        ValueError: a field has another value.
    """
    for name, known in choices.items():
        if (value := getattr(options, name)) not in known:
            raise ValueError(f"{name} is one of {', '.join(known)}, not {value!r}")


def with_options(options: T, changed: Mapping[str, Any]) -> T:
    """A copy of a frozen dataclass with the values of ``changed`` for its fields; other names are ignored."""
    names = {f.name for f in fields(options)}  # type: ignore[arg-type]
    return replace(options, **{k: v for k, v in changed.items() if k in names})  # type: ignore[type-var]


def set_options(defaults: T, given: Mapping[str, Any] | None, owner: str) -> T:
    """A copy of a frozen dataclass with some of its fields changed.

    Args:
        owner: the owner of the options, for messages.

    Raises:
        KeyError: there is no such field; the message lists the fields.
        ValueError: the dataclass refuses a value.
    """
    allowed = [f.name for f in fields(defaults)]  # type: ignore[arg-type]
    for name in given or {}:
        if name not in allowed:
            raise KeyError(f"{owner} has no option {name!r}; it has: {', '.join(allowed) or 'none'}")
    return replace(defaults, **(given or {}))  # type: ignore[type-var]
