"""The module of a rank that holds several runs of a model's layers (interleaved pipeline stages)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from spbench.impls.composition import Composition, Stage


class Chunks(nn.ModuleList):
    """A rank's stages in the order of the layers, each a module as a model builds it. Parameters have the
    names that they have in the whole model.

    Args:
        stages: which they are.
    """

    def __init__(self, modules: Sequence[nn.Module], stages: Sequence[Stage]):
        super().__init__(modules)
        self.stages = stages

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for module in self:
            yield from module.named_parameters(*args, **kwargs)

    @property
    def tied(self) -> Tensor | None:
        """The word embedding of the chunk that is the model's first or last stage; None without one."""
        for module, stage in zip(self, self.stages, strict=True):
            if stage.tied:
                weight: Tensor | None = module.tied  # type: ignore[assignment]
                return weight
        return None

    @property
    def unbatched(self) -> Any:
        """As a model's module has it."""
        return self[0].unbatched


def rank_module(build: Callable[[Stage], nn.Module], around: Composition) -> nn.Module:
    """The module of a rank, of one stage or of several.

    Args:
        build: makes the module of a stage.
    """
    modules = [build(stage) for stage in around.stages]
    return modules[0] if len(modules) == 1 else Chunks(modules, around.stages)


def chunks_of(module: nn.Module) -> list[nn.Module]:
    """The modules of a rank's stages."""
    return list(module) if isinstance(module, Chunks) else [module]
