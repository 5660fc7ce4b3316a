"""A training step of a transformers model under FSDP2 or DeepSpeed, as many programs run it: what a job says
of it. A reader fills a :class:`TransformersStep` from its own keys, which are the sources of the settings.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: fields of a config.json that say how many experts a layer has
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: of its tp_plan, which leaves the embedding alone
WHOLE_EMBEDDING = "the embedding is split by the vocabulary; transformers keeps it whole on every rank"


@dataclass(frozen=True)
class Said:
    """A job's word on one thing: the value, the keys that it came from, a note beside the setting."""

    value: Any
    names: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Adapted:
    """What a job says of adapters beside their rank.

    Attributes:
        targets: modules with an adapter: a list of names, or a pattern of whole paths; None: all linear ones.
        whole: modules that are trained whole, by name.
        by_direction: DoRA (arXiv 2402.09353).
    """

    targets: Said = Said(None)
    whole: Said = Said(())
    by_direction: Said = Said(False)


@dataclass(kw_only=True)
class TransformersStep:
    """What a job says of its step.

    Attributes:
        model: a name on Hugging Face, or a path.
        gpus: that the files start processes for; None: not said.
        sharding: "zero1", "zero2" or "zero3" of DeepSpeed, "fsdp" or "fsdp, kept" of torch's fully_shard, or
            "ddp".
        host: what the host holds: "", "optimizer", or "all": weights too.
        buffer: elements of DeepSpeed's reduce_bucket_size; None: few.
        sequence, sequence_by: ranks that share a sequence, and how; a key of SEQUENCES.
        tensor, tensor_by: ranks of tensor parallelism, and its strategy.
        tensor_loss: from which logits these compute the loss: option ``loss`` of their strategies.
        groups: of replicas, each of which shards all weights.
        replicas: how many there are, where the job says it, to be checked; None: not said.
        pipeline, schedule: its ranks, and the order in which they run micro-batches, as torch names it.
        stage_layers, rounded: layers of a stage, None: as many as of others; and whether the number of stages
            is rounded "up" or "down" to a multiple of the ranks.
        piece: sequences of a micro-batch of a pipeline, a part of ``micro_batch``.
        experts: ranks over which experts are spread, of all of a stage; what is left shards each expert.
        own_experts: FSDP leaves alone what it would not shard: experts that are spread over all ranks.
        dispatcher: how tokens reach these, a word of DISPATCHERS; routing: a value of model_options.routing.
        predicted: modules of multi-token prediction; None: not said.
        micro_batch: sequences of a rank's micro-batch.
        accumulation, batch: micro-batches of a step, or sequences of a step of all ranks; None: not said.
        deferred: under FSDP gradients are summed over ranks in a step's "last" micro-batch alone, or "kept"
            with gathered weights until then; "": in each.
        length: tokens of a sequence.
        precision: "bf16", "fp16" or "fp32"; half: weights, gradients and moments are in it alone.
        reduce: the dtype in which gradients are summed over ranks: "weights" or "fp32".
        recompute, reentrant: activation checkpointing of each layer, and by which of torch's functions.
        kept: where checkpoints wait: "device", "host" or "pageable".
        attention: as transformers has it.
        cross_entropy: model_options.cross_entropy where no kernel of Liger's has the head.
        logits_held: model_options.logits_held.
        liger: which of Liger's kernels run: words of "norm", "swiglu", "loss".
        loss_tile: head and loss are computed in tiles of so many tokens by so many rows of the vocabulary.
        mlp_tiles: the MLP is computed in tiles, each of as many tokens as the model is wide, or that number.
        optimizer: "adam", "adam 8 bits", "muon", or another.
        foreach: its update is torch's default, a kernel for each operation on all weights.
        lora: the rank of adapters; 0: all weights are trained; adapted_experts: as :func:`set_adapters` has
            it; quantized: bits of frozen weights, 0: not.
        fp8, library: the recipe of matmuls in eight bits, "": none, and whose linear layers have it.
        packed: rows are packed of several samples.
        fused: what is one kernel: words of model_options.fusions, and "permutation" of tokens to experts.
        compiled: torch.compile is on.
    """

    model: Said
    length: Said
    gpus: Said = Said(None)
    sharding: Said = Said("fsdp")
    host: Said = Said("")
    buffer: Said = Said(None)
    sequence: Said = Said(1)
    sequence_by: Said = Said("ulysses")
    tensor: Said = Said(1)
    tensor_by: Said = Said("tensor_parallel")
    tensor_loss: Said = Said("gathered", (), "transformers' tp_plan")
    groups: Said = Said(1)
    replicas: Said = Said(None)
    pipeline: Said = Said(1)
    schedule: Said = Said("1f1b")
    stage_layers: Said = Said(None)
    rounded: Said = Said("")
    piece: Said = Said(1)
    experts: Said = Said(1)
    own_experts: Said = Said(False)
    dispatcher: Said = Said("")
    routing: Said = Said("")
    predicted: Said = Said(None)
    micro_batch: Said = Said(1)
    accumulation: Said = Said(None)
    batch: Said = Said(None)
    deferred: Said = Said("")
    precision: Said = Said("bf16")
    half: Said = Said(False)
    reduce: Said = Said("weights")
    recompute: Said = Said(False)
    reentrant: Said = Said(False)
    kept: Said = Said("device")
    attention: Said = Said("sdpa")
    cross_entropy: Said = Said("plain")
    logits_held: Said = Said("none")
    liger: Said = Said("")
    loss_tile: Said = Said(None)
    mlp_tiles: Said = Said(False)
    optimizer: Said = Said("adam")
    foreach: Said = Said(False)
    lora: Said = Said(0)
    adapted: Adapted = Adapted()
    adapted_experts: Said = Said("frozen")
    quantized: Said = Said(0)
    fp8: Said = Said("")
    library: Said = Said("torch")
    packed: Said = Said(False)
    fused: Said = Said("")
    compiled: Said = Said(False)
