"""A training step of a transformers model under FSDP2 or DeepSpeed, as many programs run it: what a job says
of it. A reader fills a :class:`TransformersStep` from its own keys, which are the sources of the settings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.tools.jobs.account import Account

#: fields of a config.json that say how many experts a layer has
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
#: of torch's first FSDP: what is missing, what it moves, and why
FSDP_1 = (
    "FSDP 1",
    "time and memory",
    "torch's fully_shard stands for it, without its copy of a unit's shard in half precision, and pads "
    "messages parameter by parameter, not unit by unit",
)

#: of its tp_plan, which leaves the embedding alone
WHOLE_EMBEDDING = "the embedding is split by the vocabulary; transformers keeps it whole on every rank"


@dataclass(frozen=True)
class Said:
    """What a job says of one thing: the value, the keys that it came from, a note beside the setting."""

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


def said(k: Account, *names: str, note: str = "") -> Said:
    """The first value that is given and not null, with its key; else the default of the last."""
    value, first = k.chosen(*names)
    return Said(value, (first,) if k.has(first) else (), note)


def said_in_table(k: Account, version: str = "") -> dict[str, Any]:
    """The fields of a step that the section ``step`` of a program's table has, of a version where it has
    several: see :func:`_said_of`."""
    step = k.table.content["step"]
    return {name: _said_of(k, of) for name, of in (step[version] if version else step).items()}


def _said_of(k: Account, of: str | list[Any] | Mapping[str, Any]) -> Any:
    """What a line of the section ``step`` has.

    Args:
        of: keys of a job, of which the first that is given counts; a list of such lines, the attributes of
            :class:`Adapted`; or a mapping with a ``note`` of
            ``value``, which all jobs have;
            ``of``, such keys, ``words`` by the keys' value, and ``else``, for any other (if not: the value);
            or ``or``, in place of a value that is null, 0 or empty;
            ``when`` beside ``of``, a key, ``is``, those of its values for which ``of`` counts, and ``else``
            for any other;
            ``any``, keys, of which one is true for the value ``then``, and ``else``; or
            ``times``, ``optimizer`` or ``modules``, keys as :func:`replicas_of`, :func:`optimizer_of` and
            :func:`named_modules` have them.
    """
    if isinstance(of, str):
        return said(k, *of.split())
    if isinstance(of, list):
        return Adapted(*(_said_of(k, each) for each in of))
    note = of.get("note", "")
    if "times" in of:
        return replicas_of(k, *of["times"].split())
    if "optimizer" in of:
        return optimizer_of(k, of["optimizer"])
    if "modules" in of:
        return named_modules(k, of["modules"])
    if names := of.get("any", "").split():
        return Said(of["then" if any(map(k.value, names)) else "else"], k.given_of(*names), note)
    if "of" in of:
        value, first = k.chosen(*of["of"].split())
        when = of.get("when", "")
        names = k.given_of(*when.split(), first)
        if when and k.value(when) not in of["is"]:
            return Said(of["else"], names, note)
        if when or "or" in of:
            return Said(value or of.get("or", value), names, note)
        return Said(of.get("words", {}).get(value, of.get("else", value)), names, note)
    return Said(of["value"], (), note)


def either(k: Account, words: dict[str, Any], otherwise: Any = None) -> Said:
    """The value of the first key that is given and true; all keys are its source."""
    given = tuple(name for name in words if k.has(name))
    value = next((words[name] for name in given if k.value(name)), otherwise)
    return Said(value, given)


def optimizer_of(k: Account, name: str) -> Said:
    """Adam, in how many bits, by transformers' name for it; another's name."""
    value = str(k.value(name)).lower()
    adam = value.removeprefix("paged_").startswith("adamw")
    return Said(("adam 8 bits" if "8bit" in value else "adam") if adam else value, k.given_of(name))


def named_modules(k: Account, name: str) -> Said:
    """The names of modules that an option has: a pattern has signs that names have not."""
    value = k.value(name)
    names = value.split() if isinstance(value, str) and re.fullmatch(r"[\w. -]+", value) else value
    return Said(names, k.given_of(name))


def torchao_of(k: Account, on: bool, gathered: str, *names: str) -> Said:
    """torchao's matmuls in eight bits, as accelerate switches them on; ``gathered``: the key that has weights
    gathered in them."""
    if on and k.value(gathered):
        k.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    k.ignore("weights are gathered in sixteen bits", gathered)
    return Said("tensorwise" if on else "", k.given_of(*names), "torchao's default recipe")


def bits_of(k: Account, words: dict[str, Any]) -> Said:
    """The bits of frozen weights, by the keys that ask for them; a problem where two ask for other ones."""
    asked = [name for name in words if k.value(name)]
    if len({words[name] for name in asked}) > 1:
        k.problems.append(
            f"{' and '.join(map(k.spelled, asked))}: weights are in one number of bits; leave one"
        )
    return either(k, words, 0)


def precision_of(k: Account, bf16: Sequence[str], fp16: Sequence[str]) -> Said:
    """The precision of a job, by the keys that ask for one; a problem where some ask for another."""
    names = (*bf16, *fp16)
    if bf16 and fp16:
        k.problems.append(
            f"{' and '.join(map(k.spelled, names))}: bf16 and fp16 are both asked for; leave one"
        )
    return Said(
        "bf16" if bf16 else "fp16" if fp16 else "fp32", names, "" if names else "neither bf16 nor fp16"
    )


def replicas_of(k: Account, shards: str, *groups: str) -> Said:
    """The replicas that a job says: ranks that share weights, times groups of these; None: not said."""
    value, others = k.value(shards), [k.value(name) or 1 for name in groups]
    names = tuple(filter(k.has, (shards, *groups)))
    return Said(value * math.prod(others) if isinstance(value, int) and value > 0 else None, names)
