"""Tensors that are left on the CPU on purpose, each of which a trace on the accelerator must catch."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn

from spbench.bench.measure.engines import setup
from spbench.impls.backends.optimizer import Optimizer
from spbench.impls.training.pipeline import StageRun
from tests.measure.engines.devices import accelerator
from tests.measure.engines.devices.tracing import cell_of, traced


@contextmanager
def _after(owner: Any, name: str, change: Callable[[Any], None]) -> Iterator[None]:
    """Let ``change`` have what a function of ``owner`` returns, or the object that a method has made."""
    original = getattr(owner, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        change(args[0] if name == "__init__" else result)
        return result

    with mock.patch.object(owner, name, changed):
        yield


def _buffers_on_cpu(built: tuple[nn.Module, Any, Any]) -> None:
    for owner in built[0].modules():
        for name, buffer in owner._buffers.items():
            owner._buffers[name] = None if buffer is None else buffer.cpu()


def _scale_on_cpu(optimizer: Optimizer) -> None:
    optimizer.scale = optimizer.scale.cpu()


def _tokens_on_cpu(inputs: dict[str, torch.Tensor]) -> None:
    inputs["tokens"] = inputs["tokens"].cpu()


def _buffer_on_cpu(run: StageRun, inputs: Any) -> torch.Tensor:
    return torch.empty(run._boundary(inputs).numel(), dtype=run.dtype)


#: name of the fault: (strategy, model, backend, pipeline stages), and how it is planted
FAULTS: dict[str, tuple[tuple[str, str, str, int], AbstractContextManager[Any]]] = {
    "buffer": (("lasp", "tnl-tiny", "ddp", 1), _after(setup, "build_module", _buffers_on_cpu)),
    "loss scale": (("single", "bert-tiny", "ddp", 1), _after(Optimizer, "__init__", _scale_on_cpu)),
    "pipeline buffer": (
        ("single", "bert-tiny", "ddp", 2),
        mock.patch.object(StageRun, "receive_buffer", _buffer_on_cpu),
    ),
    "input": (("single", "bert-tiny", "ddp", 1), _after(setup, "rank_inputs", _tokens_on_cpu)),
}


def raised() -> dict[str, str]:
    """What the trace of rank 0 raises under each fault; empty where it raises nothing."""
    found = {}
    for name, (combination, planting) in FAULTS.items():
        cell = cell_of(*combination)
        assert cell is not None
        found[name] = ""
        with planting:
            try:
                traced(cell, 0, accelerator.NAME)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
    return found
