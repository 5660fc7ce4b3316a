"""The options of the backends ``zero2`` and ``zero3``, and the units in which weights are gathered."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from spbench.impls.backends.optimizer_options import DEEPSPEED_STAGE_3, HostLayout, OptimizerOptions
from spbench.impls.composition import ONE_STAGE
from spbench.impls.layout import Unsupported
from spbench.impls.options import Saving


@dataclass(frozen=True)
class ShardingOptions(OptimizerOptions):
    """Options of ZeRO-2 and ZeRO-3: how a model is set up, and when weights are gathered.

    Attributes:
        initialize: where the weights are before they are sharded: on the "meta" device, without memory, or
            all of them on the "device".
        wrap: the units whose weights are gathered together: "blocks": each block, and the rest of the model;
            "embedding": also the word embedding, as in torchtitan; "whole": the whole model is one unit.
        reshard_rest: free the weights of the rest after forward, as those of blocks; torchtitan keeps them.
        reduce_dtype: the dtype of gradients while they are summed over ranks: the weights', or "fp32".
        reduce_at: the micro-batch in whose backward gradients are summed over ranks: "each", or the "last",
            until which each rank adds to whole gradients in the dtype of the sum
            (``set_requires_gradient_sync``; accelerate 1.15, accelerator.py, ``no_sync``); "kept": the last,
            and gathered weights are not freed until then (``set_reshard_after_backward``).
        own_weights: weights that no other rank shares, as experts that are spread over all ranks: in "units"
            like other weights, or "apart" from all units (``ignored_params`` of fully_shard; NeMo Automodel,
            components/moe/parallelizer.py, ``apply_fsdp``), with gradients of their own dtype.
        state_dtype: the dtype of the optimizer's state and gradients: "fp32" where the precision has masters,
            or the weights'.
        frozen_dtype: the dtype of the shards of weights that are frozen next to adapters: the "weights"', or
            "fp32", as in a program that loads its model in float32.
        forward_prefetch, backward_prefetch: number of further blocks to gather when a block begins its
            forward or backward (``set_modules_to_forward_prefetch`` and ``set_modules_to_backward_prefetch``
            of torch's ``FSDPModule``). 0: torch's own choice.
        gradient_buffer_kib: KiB of a buffer that the device holds from set-up on: DeepSpeed's
            ``reduce_bucket_size`` elements of the dtype in which gradients are summed, with its
            ``contiguous_gradients`` (runtime/zero/stage3.py); its default is 5e8, in bfloat16 976563 KiB.
            Copies through the buffer are not modelled.
        data_parallel_replicate_degree: groups of ranks of which each holds the whole model in shards, as
            torchtitan's setting of that name has them (hybrid sharding, HSDP; Zhao et al., arXiv 2304.11277,
            section 3.2.2). Consecutive ranks share a model. 1: all ranks share one.
        parameters: where the shards are between their all-gathers. "host", with ``optimizer: host``: as in
            CPUOffloadPolicy of ``fully_shard``; they are the masters. With the optimizer alone on the host it
            works as DeepSpeed's offload_optimizer of ZeRO-3, see DEEPSPEED_STAGE_3: the device keeps shards
            in the dtype of the weights.

        pinned_gradients: where the optimizer alone is on the host, gradients are in pinned memory there.
            False: in pageable memory, and the host waits for each copy, as with DeepSpeed's ``pin_memory:
            false``, its default until August 2026 (runtime/zero/offload_config.py, commit 7dfa67ae).

    Raises:
        ValueError: a number is negative, an option has another word, or parameters are on the host without
            the optimizer.
    """

    initialize: Literal["meta", "device"] = "meta"
    wrap: Literal["blocks", "embedding", "whole"] = "blocks"
    reshard_rest: bool = True
    reduce_dtype: Literal["weights", "fp32"] = "weights"
    reduce_at: Literal["each", "last", "kept"] = "each"
    own_weights: Literal["units", "apart"] = "units"
    state_dtype: Literal["fp32", "weights"] = "fp32"
    frozen_dtype: Literal["weights", "fp32"] = "weights"
    forward_prefetch: int = 0
    backward_prefetch: int = 0
    gradient_buffer_kib: int = 0
    data_parallel_replicate_degree: int = 1
    parameters: Literal["device", "host"] = "device"
    pinned_gradients: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.parameters == "host" and self.optimizer == "device":
            raise ValueError("parameters: host needs optimizer: host, for that updates them where they are")
        for name, of in (
            ("forward_prefetch", "blocks"),
            ("backward_prefetch", "blocks"),
            ("gradient_buffer_kib", "KiB"),
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is a number of {of}, 0 or more, not {getattr(self, name)}")

        if self.own_weights == "apart" and self.optimizer == "host":
            raise ValueError("own_weights: apart needs optimizer: device, for the host takes shards alone")
        if self.data_parallel_replicate_degree < 1:
            raise ValueError(
                "data_parallel_replicate_degree is a number of groups from 1 on, "
                f"not {self.data_parallel_replicate_degree}"
            )

    @property
    def masters_on_host(self) -> bool:
        """Whether the host has masters of the shards, which are on the device."""
        return self.optimizer == "host" and self.parameters == "device"

    @property
    def host_layout(self) -> HostLayout:
        """How the host holds the optimizer's state if the shards are on the device."""
        return replace(DEEPSPEED_STAGE_3, pinned_gradients=self.pinned_gradients)

    def sharing(self, ranks: int) -> int:
        """Number of ranks, out of ``ranks`` that sum a gradient, that shard a parameter between them.

        Raises:
            Unsupported: the ranks are not a multiple of the groups, or a group has one rank.
        """
        groups = self.data_parallel_replicate_degree
        if groups == 1:
            return ranks
        if ranks % groups or ranks == groups:
            raise Unsupported(
                f"data_parallel_replicate_degree {groups} does not cut {ranks} ranks into groups of several",
                "use a smaller divisor of them, or the backend ddp for whole models",
            )
        return ranks // groups

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        """Yields the settings that a search for the fastest layout tries (:meth:`Options.searched`)."""
        yield {}
        yield {"optimizer": "host"}
        yield {"optimizer": "host", "parameters": "host"}

    def savings(self) -> Iterator[Saving]:
        for name, less, words in (
            ("initialize", "meta", "set-up never holds the whole model"),
            ("wrap", "blocks", "one block is gathered at a time"),
            ("reshard_rest", True, "embedding and head are freed after forward too"),
            ("reduce_dtype", "weights", "gradients are summed in the dtype of the weights"),
            ("reduce_at", "each", "no rank holds whole gradients from one micro-batch to the next"),
            ("state_dtype", "weights", "the optimizer holds the dtype of the weights, no float32"),
        ):
            if getattr(self, name) not in (less, "embedding"):
                yield Saving({name: less}, words)
        yield from super().savings()
        if self.parameters == "device":
            words = "shards of weights wait on the host too, with their gradients"
            yield Saving({"optimizer": "host", "parameters": "host"}, words)


def units_of(module: nn.Module, options: ShardingOptions) -> list[nn.Module]:
    """The modules whose weights are gathered as units of their own, apart from the rest of the model.

    Raises:
        Unsupported: the embedding must be a unit, but the model has none or uses it for the head too.
    """
    blocks = [*getattr(module, "blocks", nn.ModuleDict()).values()]
    later = not getattr(module, "stage", ONE_STAGE).first
    if options.wrap == "embedding" and not later:  # a later stage has none
        embedding = getattr(module, "embedding", None)
        if not isinstance(embedding, nn.Module) or getattr(module, "tied", None) is not None:
            raise Unsupported("the model has no word embedding apart from its head", "use wrap: blocks")
        return [embedding, *blocks]
    return [] if options.wrap == "whole" else blocks
