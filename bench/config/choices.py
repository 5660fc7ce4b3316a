"""What cells may name, and what each of these takes, as plain data: known without torch where it is kept on
disk (:mod:`bench.declarations`)."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from spbench.bench.cell import TrainingOptions
from spbench.bench.declarations import declared
from spbench.bench.engines.engine import engine_class, engines
from spbench.bench.engines.peer_packages import missing_problem
from spbench.bench.errors import suggestion
from spbench.bench.meters.registry import meters
from spbench.bench.search.search import quantities
from spbench.bench.yaml_files import first_problem
from spbench.impls.backends.registry import backends
from spbench.impls.peers.registry import peers
from spbench.impls.strategies.nesting import PLUS, nesting
from spbench.impls.strategies.registry import strategies


@declared
def names(kind: str) -> list[str]:
    """The names of all models, strategies, peers, engines, meters, quantities or backends."""
    return list(_known(kind))


def _known(kind: str) -> Iterable[str]:
    if kind == "model":
        from spbench.impls.models.model import models

        return sorted(models())
    if kind == "strategy":
        return sorted(strategies())
    if kind == "peer":
        return sorted(peers())
    if kind == "backend":
        return sorted(backends())
    return {"engine": engines, "meter": meters, "quantity": quantities}[kind]()


@declared
def engine_property(engine: str, name: str) -> bool:
    """What the class of an engine says of it, as ``on_devices``; see :class:`Engine`."""
    return bool(getattr(engine_class(engine), name))


#: names that others have for strategies, which are unlike those here
ELSEWHERE = {"usp": "ulysses+ring_attention", "rsa": "ring_self_attention", "tp": "tensor_parallel"}


def strategy_problem(name: str) -> str:
    """What is wrong with the name of a strategy, or of several around each other; empty if nothing. A peer
    whose package is not installed cannot be named."""
    return _name_problem(name) or missing_problem(name)


@declared
def _name_problem(name: str) -> str:
    known = [*names("strategy"), *names("peer")]
    for part in name.split(PLUS):
        if part not in known:
            here = ELSEWHERE.get(part.lower())
            hint = f"; here that is {here}" if here else suggestion(part, known)
            return f"unknown strategy {part!r}{hint}"
    try:
        nesting(name)
    except ValueError as error:
        return str(error)
    return ""


@declared
def option_mistakes(
    section: str, name: str, given: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> list[tuple[list[str], str]]:
    """What is wrong with options, as (path below ``section``, message).

    Args:
        section: the key under which they stand in a cell: model_options, strategy_options or training.
        name: of the model, strategy or backend whose options they are.
        config: of a model, the config.json that it is made of.
    """
    others: list[str] = []
    defaults: Any
    if section == "model_options":
        from spbench.impls.models.model import unchanged_model

        defaults = unchanged_model(name, config)
    elif section == "strategy_options":
        defaults = nesting(name).options_type()
    else:
        defaults, others = backends()[name].options_type(), list(TrainingOptions.model_fields)
    return list(_mistakes(given, defaults, others))


def _mistakes(
    given: Mapping[str, Any], defaults: Any, others: Sequence[str]
) -> Iterator[tuple[list[str], str]]:
    """As :func:`option_mistakes`.

    Args:
        defaults: the options as they are by default, a frozen dataclass.
        others: further keys that may stand there.
    """
    known, checks = (
        [*others, *(f.name for f in fields(defaults))],
        _type_checks(cast(Hashable, type(defaults))),
    )
    for name, value in given.items():
        if name not in known:
            what = "unknown key" if others else "unknown option"
            yield [name], what + (suggestion(name, known) or "; there are none")
            continue
        try:
            if name in checks:
                checks[name].validate_python(value, strict=True)
        except ValidationError as error:
            yield [name], first_problem(BaseModel, error)[1]
        if type(value) is int:
            # a whole number is a count of something, and of none only where that is the default
            least = 0 if getattr(defaults, name) == 0 else 1
            if value < least:
                yield [name], f"must be at least {least}, not {value}"
    if all(name in known for name in given):
        try:
            replace(defaults, **given)
        except ValueError as error:
            yield [], str(error)


@cache
def _type_checks(options: Any) -> Mapping[str, TypeAdapter[Any]]:
    """What checks the value of each field of a dataclass; kept, as evaluating annotations takes long."""
    hints = get_type_hints(options)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(options)}
