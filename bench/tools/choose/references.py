"""The small traces that estimates rest on: the model with one and two layers on one rank, without and with
each memory-saving setting, and each backend on two and four replicas."""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure import MemoryLog, backend_options, model_parameters, plan
from spbench.bench.tools.choose.asking import Asking
from spbench.bench.tools.choose.layouts import backend_settings
from spbench.bench.tools.choose.look import ACTIVATIONS, looks
from spbench.bench.tools.choose.question import Question
from spbench.impls import PRECISIONS, BytesInBackward, Stage, Unsupported, backend_class, model_preset

#: replicas of the traces of backends
_REPLICAS = (2, 4)
_FEW_POSITIONS = 256
#: numbers of pipeline stages; a memory-saving setting of the model must exist for each
_STAGES = (1, 2, 4)
#: the key (see :func:`as_text`) of no settings
AS_IT_IS = ""


@dataclass(frozen=True)
class Depths:
    """A number of a model with one layer and with two, from which follows the number at any depth."""

    one: float
    two: float

    @cached_property
    def layer(self) -> float:
        """The part of the number that one layer adds."""
        return self.two - self.one

    @cached_property
    def ends(self) -> float:
        """The part of the number that is in no layer, such as embedding and head."""
        return max(0.0, self.one - self.layer)

    def of_stage(self, layers: float, stages: int) -> float:
        """The number for ``layers`` over several pipeline stages; the first and the last have half the ends
        each."""
        return self.layer * layers / stages + self.ends * (1 if stages == 1 else 0.5)


@dataclass(frozen=True)
class Reference:
    """Seconds and bytes of one sample on one rank, at one and at two layers.

    Attributes:
        seconds: seconds of a step without communication and without the update of weights.
        activation_bytes: bytes in forward and backward; see :data:`ACTIVATIONS`.
    """

    seconds: Depths
    activation_bytes: Depths


@dataclass(frozen=True)
class BackendFigures:
    """The bytes that a backend holds and sends for each element of parameters that a rank has.

    Attributes:
        whole_bytes, shared_bytes: bytes of states that every replica has, and that replicas share out.
        in_backward: further bytes in backward, without pipeline stages, and with stages.
        once, each: bytes by collective that replicas exchange once a step, and with each micro-batch.
        host_bytes: bytes of states on the hosts of all replicas together.
    """

    whole_bytes: float
    shared_bytes: float
    once: Mapping[str, float]
    each: Mapping[str, float]
    host_bytes: float = 0.0
    in_backward: tuple[BytesInBackward, BytesInBackward] = (BytesInBackward(), BytesInBackward())

    @property
    def again(self) -> Mapping[str, float]:
        """Bytes by collective that pipeline stages send with each further micro-batch: the gathers of one
        pass, if gathered weights are not kept."""
        gathers = self.each.get("all_gather", 0.0)
        return {"all_gather": gathers / 2} if gathers and not self.in_backward[0].whole else {}


def as_text(settings: Mapping[str, Any]) -> str:
    """Settings as JSON text, a key of mappings; "" for no settings."""
    return json.dumps(settings, sort_keys=True) if settings else AS_IT_IS


def savings_of(question: Question) -> dict[str, dict[str, Any]]:
    """The memory-saving settings of the question's model for any number of stages, by their text: none, each
    alone, each two that set different options, and as many together as possible."""
    model = question.model
    of_stages = [{as_text(each.options): dict(each.options) for each in model.savings(n)} for n in _STAGES]
    alone = [each for text, each in of_stages[0].items() if all(text in others for others in of_stages)]
    savings: dict[str, dict[str, Any]] = {AS_IT_IS: {}}
    for together in [*_apart(alone, 1), *_apart(alone, 2), *_most(alone)]:
        options = {name: value for each in together for name, value in each.items()}
        on_two = question.on_replicas(model_options={**question.cell.model_options, **options})
        kept = question.keeps({f"model_options.{name}": value for name, value in options.items()})
        if kept and question.runs(on_two, "model_options"):
            savings.setdefault(as_text(options), options)
    return savings


def _apart(settings: Sequence[Mapping[str, Any]], n: int) -> Iterator[Sequence[Mapping[str, Any]]]:
    """Each choice of ``n`` of the settings that set different options."""
    for chosen in itertools.combinations(settings, n):
        if len({name for each in chosen for name in each}) == sum(map(len, chosen)):
            yield chosen


def _most(settings: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    """For each setting, that setting with as many others as set different options; the last come first,
    because the settings that take least memory are last."""
    for first in settings:
        chosen = [first]
        for each in reversed(settings):
            if not any(each.keys() & other.keys() for other in chosen):
                chosen.append(each)
        yield sorted(chosen, key=settings.index)


def at_depth(cell: Cell, layers: int) -> Cell:
    """The cell with ``layers`` layers (or periods of unlike layers), none of them dense; the cell itself if
    its model has no number of layers."""
    model = model_preset(*cell.model_arguments)
    if not hasattr(model, "layers"):
        return cell
    options = {**cell.model_options, "layers": layers * model.period}
    if model.unlike_layers:
        options["dense_layers"] = 0
    return cell.model_copy(update={"model_options": options})


def few_experts(cell: Cell) -> Cell:
    """The cell with only as many experts as a token meets. A step takes equally long, except for the update
    of the other experts, which ranks share."""
    model = model_preset(*cell.model_arguments)
    if not getattr(model, "experts", 0):
        return cell
    few = {"experts": model.experts_per_token, "router_groups": 0, "router_group_topk": 0, "routing": "even"}  # type: ignore[attr-defined]
    return cell.model_copy(update={"model_options": {**cell.model_options, **few}})


def references(
    question: Question,
    asking: Asking,
    savings: Mapping[str, Mapping[str, Any]],
    ended: Callable[[int, int], None] = lambda n, of: None,
) -> tuple[dict[str, Reference], dict[str, BackendFigures]]:
    """(references by the model's settings, figures by the backend's, as text), without any that cannot run.

    Args:
        ended: see :func:`looks`.

    Raises:
        UserError: the model without memory-saving settings cannot run.
    """
    cells: dict[tuple[str, str, int], Cell] = {}  # the same twice where there are no layers, so one depth
    for (text, settings), layers in itertools.product(savings.items(), (1, 2)):
        options = {**question.cell.model_options, **settings}
        alone = question.on_replicas(1, 1, model_options=options)
        cells["model", text, layers] = few_experts(at_depth(alone, layers))
    for layers in () if question.forward_only else (1, 2):
        twice = question.on_replicas(1, 2, {"micro_batches": 2})
        cells["twice", AS_IT_IS, layers] = few_experts(at_depth(twice, layers))
    kinds = backend_settings(question)
    for settings, dp in itertools.product(kinds, _REPLICAS):
        cell = few_experts(at_depth(question.on_replicas(dp, dp, settings), 1))
        cells["backend", as_text(settings), dp] = _short(cell)
    of_key = {cell.key: outcome for cell, outcome in looks(asking, cells.values(), "small", ended)}
    if (as_it_is := of_key[cells["model", AS_IT_IS, 1].key]).status == "unsupported":
        raise UserError(f"{question.cell.model} cannot be run: {as_it_is.reason}")

    def measured(kind: str, text: str, sizes: Sequence[int] = (1, 2)) -> list[Mapping[str, Any]]:
        """The measurements of two small traces; none: one of them cannot run, or was not asked for."""
        outcomes = [of_key[cells[kind, text, n].key] for n in sizes if (kind, text, n) in cells]
        refused = any(each.status == "unsupported" for each in outcomes)
        return [] if refused else [each.measurement for each in outcomes]

    # the update of weights happens once, not for each micro-batch, whatever the settings of the model
    both = zip(measured("model", AS_IT_IS), measured("twice", AS_IT_IS), strict=False)
    updating_s = [max(0.0, 2 * m["step_time_s"] - twice["step_time_s"]) for m, twice in both] or [0.0, 0.0]
    of_model = {text: pair for text in savings if (pair := measured("model", text))}
    return (
        {
            text: Reference(
                Depths(*(m["step_time_s"] - s for m, s in zip(pair, updating_s, strict=True))),
                Depths(*(m["meters"][ACTIVATIONS]["bytes"] for m in pair)),
            )
            for text, pair in of_model.items()
        },
        {
            text: _backend(cells["backend", text, _REPLICAS[0]], *pair)
            for text in map(as_text, kinds)
            if (pair := measured("backend", text, _REPLICAS))
        },
    )


def _short(cell: Cell) -> Cell:
    """The cell with few positions, so that its peak is mostly states; unchanged if it cannot run so."""
    short = cell.model_copy(update={"seq_len": min(cell.shape[1], _FEW_POSITIONS)})
    try:
        plan(short)
    except Unsupported:
        return cell
    return short


def _backend(cell: Cell, fewest: Mapping[str, Any], most: Mapping[str, Any]) -> BackendFigures:
    """The figures of the backend of a cell, from measurements on both numbers of replicas."""
    elements = float(model_parameters(cell)) or 1.0  # a model without weights has no states
    held = (measurement["peak_held"] for measurement in (fewest, most))
    few_bytes, many_bytes = (sum(at.get(name, 0) for name in MemoryLog.STATES) / elements for at in held)
    # bytes = whole + shared / replicas, at both numbers of replicas
    a, b = _REPLICAS
    shared = max(0.0, (few_bytes - many_bytes) / (1 / a - 1 / b))
    forward_only = cell.training.step == "inference"
    once, twice = (_sent(cell, n, elements) for n in ((1, 1) if forward_only else (1, 2)))
    each = {name: max(0.0, twice[name] - once[name]) for name in once}
    backend = backend_class(cell.training.backend)
    of = PRECISIONS[cell.precision], backend.options_type(**cell.training.backend_options)
    return BackendFigures(
        max(0.0, few_bytes - shared / a),
        shared,
        {name: max(0.0, n - each[name]) for name, n in once.items()},
        each,
        a * (fewest["peak_host_memory_bytes"] or 0) / elements,
        (backend.bytes_in_backward(*of, False), backend.bytes_in_backward(*of, True)),
    )


def _sent(cell: Cell, micro_batches: int, elements: float) -> Counter[str]:
    """Bytes by collective that replicas exchange in a step, for each element of their parameters."""
    training = cell.training.model_copy(update={"micro_batches": micro_batches})
    planned = cell.model_copy(update={"training": training, "batch": cell.sizes.dp * micro_batches})
    sent: Counter[str] = Counter()
    for row in plan(planned).formula(0):
        sent[row["collective"]] += row["payload_bytes"] * row["count"] / elements
    return sent


def has_stages(question: Question, settings: Mapping[str, Any]) -> bool:
    """Whether a backend with these settings divides the question's model into stages of a pipeline."""
    backend = backend_class(settings["backend"])
    cell = at_depth(question.on_replicas(1, 2, settings), 2)
    model, ends = model_preset(*cell.model_arguments), (Stage(0, 2), Stage(1, 2))
    try:
        sites = [site for end in ends for site in model.sites(1, cell.shape[1], 1, end)]
        backend.check_stages(backend_options(cell), any(site.kind == "tied_embedding" for site in sites))
    except Unsupported:
        return False
    return backend.pipelined


def families_of(backends: Sequence[Mapping[str, Any]], on_host: Sequence[bool]) -> list[int]:
    """For each backend's settings, the index of the closest settings that keep all states on cards: its own
    if it has none on the host, or if there are no such settings."""

    def family(at: int) -> int:
        own = backends[at].items()
        others = [n for n, each in enumerate(backends) if not on_host[n] and each.items() <= own]
        return max(others, key=lambda n: len(backends[n]), default=at) if on_host[at] else at

    return [family(at) for at in range(len(backends))]
