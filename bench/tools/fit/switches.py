"""The memory switches of a cell: what takes less memory and computes the same on the same ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.fit.suggestions import Change, part_on_host, savings_of
from spbench.impls.models.model import Model, model_preset

#: the option whose values of several switches are put together
MODULES = "model_options.recompute_modules"
RECOMPUTE, _BACKEND = "model_options.recompute", "training.backend"
#: of recomputation in whole layers: how many, and of which
_LAYERS, _METHOD = "model_options.recompute_layers", "model_options.recompute_method"
#: what changes the numbers that are computed: the dtypes of sums and states
_OF_NUMBERS = ("training.reduce_dtype", "training.state_dtype")


def switches(cell: Cell) -> list[Change]:
    """The switches of a cell: recomputation by module and by layers, checkpoints on the host, tiles, how much
    of the optimizer is there, and what else its options declare that leaves the numbers as they are."""
    declared = [
        each
        for each in savings_of(cell)
        if not {_BACKEND, *_OF_NUMBERS} & {*each.settings} and not _whole(each)
    ]
    model = model_preset(*cell.model_arguments)
    return [*declared, *_by_module(model), *part_on_host(cell)]


def share_of_layers(cell: Cell, change: Change) -> float | None:
    """The share of its stage's layers that a switch computes again; None: it is of all layers alike."""
    if change.settings.get(_METHOD) != "block":
        return None
    stages = cell.sizes.pp * cell.training.virtual_stages
    layers = getattr(model_preset(*cell.model_arguments), "layers", 0) // stages
    return change.settings[_LAYERS] / layers if layers else None


def _whole(change: Change) -> bool:
    """Whether it is selective recomputation without a module, which :func:`_by_module` has by its module."""
    return change.settings == {RECOMPUTE: "selective"}


def _by_module(model: Model) -> Iterator[Change]:
    """Recomputation of each module that layers have, where none is recomputed whole."""
    if getattr(model, "recompute", "full") not in ("none", "selective"):
        return
    experts = bool(getattr(model, "experts", 0))
    has = {
        "core_attn": True,
        "moe_act": experts,
        "moe": experts,
        "shared_experts": experts and bool(getattr(model, "shared_inner", 0)),
        "mlp": not experts or bool(getattr(model, "dense_layers", 0)),
        "layernorm": True,
        "mla_up_proj": bool(getattr(model, "kv_lora_rank", 0)),
    }
    already = {*getattr(model, "recompute_modules", ())} if model.recompute == "selective" else set()  # type: ignore[attr-defined]
    for module in (name for name, there in has.items() if there and name not in already):
        settings = {RECOMPUTE: "selective", MODULES: sorted({module, *already})}
        yield Change(settings, f"backward runs {module} again")


def together(changes: Sequence[Change]) -> Change | None:
    """Switches as one, modules that are recomputed put together; None: two of them give one setting unlike
    values, or one has all settings of another, so that it is no further switch."""
    settings: dict[str, Any] = {}
    for change in changes:
        for name, value in change.settings.items():
            if name == MODULES and name in settings:
                value = sorted({*settings[name], *value})
            elif settings.setdefault(name, value) != value:
                return None
            settings[name] = value
    if any(_within(a, b) for a in changes for b in changes if a is not b):
        return None
    return Change(settings, "; ".join(change.words for change in changes))


def _within(a: Change, b: Change) -> bool:
    """Whether a switch does nothing that another one does not."""
    rest: Mapping[str, Any] = {name: value for name, value in a.settings.items() if name != MODULES}
    modules = {*a.settings.get(MODULES, ())} <= {*b.settings.get(MODULES, ())}
    return modules and rest.items() <= b.settings.items()
