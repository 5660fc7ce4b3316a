"""Strategies, peers, data-parallel backends and models by name: those in the modules of their packages, and
those of plug-ins. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from spbench.impls.axes import MESH_AXES
from spbench.impls.discovery import looked_up, named_classes, named_values
from spbench.impls.options import Options, set_options

if TYPE_CHECKING:
    from spbench.impls.as_published.as_published import AsPublished
    from spbench.impls.backends.backend import Backend
    from spbench.impls.models.model import Model
    from spbench.impls.peers.peer import Peer
    from spbench.impls.strategies.base import Strategy

#: the backend of cells that name none
DEFAULT_BACKEND = "legacy_ddp"


def all_strategies() -> Mapping[str, type[Strategy]]:
    """Every strategy by name; plug-ins add theirs by entry points of the group `spbench.strategies`."""
    from spbench.impls.strategies.base import Strategy

    return named_classes("spbench.impls.strategies", Strategy, "spbench.strategies")


def strategy_class(name: str) -> type[Strategy]:
    """The class of the strategy of that name: one of :func:`all_strategies`, of :func:`all_peers` (installed
    or not), or of :func:`all_as_published`.

    Raises:
        KeyError: with the known names, if there is none.
    """
    return looked_up({**all_as_published(), **all_peers(), **all_strategies()}, name, "strategy")


def all_peers() -> Mapping[str, type[Peer]]:
    """Every peer by name, whether or not its package is installed."""
    from spbench.impls.peers.peer import Peer

    return named_classes("spbench.impls.peers", Peer)


def flash_attn_if_absent() -> None:
    """Make ``flash_attn`` importable in this process, by torch's kernels, if the package is not installed."""
    from spbench.impls.discovery import absent
    from spbench.impls.peers import flash_attn_stand_in

    if absent(["flash-attn"]):
        flash_attn_stand_in.install()


def all_as_published() -> Mapping[str, type[AsPublished]]:
    """Every baseline as its authors ran it, by name; no baseline is a method to use."""
    from spbench.impls.as_published.as_published import AsPublished

    return named_classes("spbench.impls.as_published", AsPublished)


def all_backends() -> Mapping[str, type[Backend]]:
    """Every backend by name; plug-ins add theirs by entry points of the group `spbench.backends`."""
    from spbench.impls.backends.backend import Backend

    return named_classes("spbench.impls.backends", Backend, "spbench.backends")


def backend_class(name: str) -> type[Backend]:
    """The class of the backend of that name.

    Raises:
        KeyError: with the known names, if there is none.
    """
    return looked_up(all_backends(), name, "backend")


def options_of_backend(name: str, given: Mapping[str, Any]) -> Options:
    """The options of the backend of that name, with those in ``given`` set; raises as :func:`set_options`."""
    return set_options(backend_class(name).options_type(), given, f"backend {name}")


def backend_defaults(name: str) -> dict[str, Any]:
    """The default options of a backend, by option name; empty if there is no such backend."""
    return asdict(all_backends()[name].options_type()) if name in all_backends() else {}


def all_models() -> Mapping[str, Model]:
    """Every model by name: the PRESETS of the modules of impls/models, and those that plug-ins add by entry
    points of the group `spbench.models`, each of a module with PRESETS or of such a mapping."""
    from spbench.impls.models.model import Model

    return named_values("spbench.impls.models", "PRESETS", Model, "spbench.models")


def model_preset(
    name: str, options: Mapping[str, Any] | None = None, config: Mapping[str, Any] | None = None
) -> Model:
    """The model of that name with some of its options changed.

    Args:
        config: the fields of a Hugging Face config.json; then ``name`` is its path, used only in messages.

    Raises:
        KeyError: unknown name or option, with the known ones.
        ValueError: the model refuses a value, or the config.json has something that no model supports.
    """
    return set_options(unchanged_model(name, config), options, f"model {name}")


def unchanged_model(name: str, config: Mapping[str, Any] | None = None) -> Model:
    """The model of :func:`model_preset` with the options of the preset or of the config.json."""
    if config is None:
        return looked_up(all_models(), name, "model")
    from spbench.impls.models.huggingface.config import model_from_config

    return model_from_config(config)


MESH_AXES.look = all_strategies  # a strategy adds its axes when it is imported
