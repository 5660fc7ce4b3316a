"""What cells may name, and what each of these takes, as plain data: known without torch where it is kept on
disk (:mod:`spbench.bench.declarations`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.declarations import declared
from spbench.bench.engines.engine import engine_class, engines
from spbench.bench.engines.peer_packages import missing_problem
from spbench.bench.errors import suggestion
from spbench.bench.meters.registry import meters
from spbench.bench.search.search import Search, quantities
from spbench.impls.backends.registry import backends
from spbench.impls.layout import Unsupported
from spbench.impls.options import wrong_values
from spbench.impls.peers.registry import peers
from spbench.impls.strategies.nesting import PLUS, nesting
from spbench.impls.strategies.registry import strategies

#: names that others have for strategies, which are unlike those here
ELSEWHERE = {"usp": "ulysses+ring_attention", "rsa": "ring_self_attention", "tp": "tensor_parallel"}


@declared
def names(kind: str) -> list[str]:
    """The names of all models, strategies, peers, engines, meters, quantities or backends, sorted."""
    known: Mapping[str, Any] = {
        "strategy": strategies,
        "peer": peers,
        "backend": backends,
        "engine": engines,
        "meter": meters,
        "quantity": quantities,
    }
    if kind == "model":
        from spbench.impls.models.model import models

        return sorted(models())
    every: Iterable[str] = known[kind]()
    return sorted(every) if kind in ("strategy", "peer", "backend") else list(every)


@declared
def engine_property(engine: str, name: str) -> bool:
    """What the class of an engine says of it, as ``on_devices``; see :class:`Engine`."""
    return bool(getattr(engine_class(engine), name))


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


def refusal(cell: Cell) -> str:
    """Why a cell cannot run, as far as its sizes and closed forms tell; "" if they do not. A search cannot
    where neither the smallest nor the largest value can that it may try."""
    return _refusal(cell.model_dump(mode="json"))


@declared
def _refusal(content: Mapping[str, Any]) -> str:
    from spbench.bench.engines.plan import plan

    cell = Cell.model_validate(content)
    reason = ""
    try:
        search = Search(cell) if cell.search is not None else None
        for tried in [cell] if search is None else [search.at(search.values[at]) for at in (-1, 0)]:
            try:
                plan(tried)
            except Unsupported as error:
                reason = str(error)
            else:
                return ""
    except Unsupported as error:
        reason = str(error)
    return reason


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
    """As :func:`option_mistakes`; ``others`` are further keys that may stand there."""
    own = [field.name for field in fields(defaults)]
    known = [*others, *own]
    what = "unknown key" if others else "unknown option"
    mistakes = [
        ([name], what + (suggestion(name, known) or "; there are none"))
        for name in given
        if name not in known
    ]
    here = {name: value for name, value in given.items() if name in own}
    mistakes += [([name], message) for name, message in wrong_values(defaults, here)]
    yield from mistakes
    if not mistakes:
        try:
            replace(defaults, **here)
        except ValueError as error:
            yield [], str(error)
