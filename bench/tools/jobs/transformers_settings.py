"""The settings of a job that trains a transformers model, from the fields of the job's step: the model, the
ranks of each kind of parallelism, the stages, and the batch. The rules of transformers.yaml set the rest.

Pipelines and experts follow NeMo Automodel (commit 36044ad3: components/distributed/pipelining/ functional.py
and components/moe/parallelizer.py), by torch.distributed.pipelining and ``fully_shard``.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.adapter_settings import EXPERTS, LINEAR_ATTENTION, named_model, set_adapters
from spbench.bench.tools.jobs.argument_tables import shown, table_content
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.rules import Said, follow, said_of
from spbench.bench.tools.jobs.torchtitan_models import SCHEDULES, set_stages, stage_layers

#: words of model_options.fusions for operators that torch.compile fuses, so that fewer tensors are kept
FUSED_BY_COMPILER = ("swiglu", "rope")


def set_step(account: Account, step: SimpleNamespace, files: JobFiles) -> None:
    """Add the settings of a step, whose fields :func:`step_lines.step_of` returns, to the account."""
    fields = _model(account, step.model, files)
    if step.experts.value == "auto":  # resolve_ep of prime-rl
        ranks = (files.gpus or step.gpus.value or 1) // (step.groups.value or 1)
        most = min(ranks, 8) if any(map(fields.get, EXPERTS)) else 1
        step.experts = Said(most, step.experts.names, "at most 8 ranks")
    account.facts |= _facts_of_fields(account, step)
    replicas = _layout(account, step, files)
    if replicas is not None:
        _batch(account, step, replicas)
    if step.length.value is None:
        given = f"; --given {step.length.names[0]}=N" if step.length.names else ""
        account.problems.append(f"how long sequences are is not said{given}")
    elif _count(account, step.length, "tokens of a sequence"):
        account.set("seq_len", step.length.value, *step.length.names, note=step.length.note)
    account.set("precision", step.precision.value, *step.precision.names, note=step.precision.note)
    set_pipeline(account, step, fields)
    account.facts |= _facts(account, step, fields)
    for name, line in table_content("transformers")["facts"].items():
        account.facts[name] = said_of(account, line).value
    account.calls = {
        "adapters": lambda account: set_adapters(
            account, step.lora, fields, step.adapted, experts=step.adapted_experts.value
        ),
    }
    for section in table_content("transformers")["rules"].values():
        follow(account, section)
    account.first_steps()


def _facts_of_fields(account: Account, step: SimpleNamespace) -> dict[str, Any]:
    """The facts for rules from the fields of a step: the value as ``FIELD``, the field's keys as
    ``FIELD.names``, the job's spelling of the keys as ``FIELD.spelled``, the note as ``FIELD.note``."""
    facts: dict[str, Any] = {}
    for name, said in vars(step).items():
        if isinstance(said, Said):
            spelled = " and ".join(account.spelled(each) for each in said.names if account.has(each))
            facts |= {name: said.value, f"{name}.names": [*said.names], f"{name}.note": said.note}
            facts[f"{name}.spelled"] = spelled
    return facts


def _facts(account: Account, step: SimpleNamespace, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The facts for rules that need several fields of a step, and ``config.NAME`` for each of ``fields``, of
    the model's config.json."""
    settings = {each.path: each.value for each in account.settings}
    of_ranks = [settings[path] for path in ("sizes.dp", "sizes.sp", "sizes.tp") if path in settings]
    experts = next((fields[name] for name in EXPERTS if fields.get(name)), 0)
    shared, family = table_content("transformers"), str(fields.get("model_type", ""))
    liger, fused = (str(each.value).split() for each in (step.liger, step.fused))
    gated = family not in shared["without_swiglu"] and fields.get("hidden_act", "silu") == "silu"
    ranks, tiles, bits = step.experts.value, step.mlp_tiles.value, step.quantized.value
    lacking = any(map(fields.get, ("kv_lora_rank", *LINEAR_ATTENTION))) or tiles
    unpacked = 4 if step.precision.value == "fp32" else 2
    facts: dict[str, Any] = {f"config.{name}": value for name, value in fields.items()}
    in_text = {**fields, **fields.get("text_config", {})}
    options = _options_of_zero(step.zero_options.value, in_text.get("hidden_size"))
    facts |= {f"zero_options.{name}": value for name, value in options}
    buffer = facts.get("zero_options.reduce_bucket_size", 0)
    facts |= {
        "routed": experts,
        "experts_lacking": isinstance(ranks, int) and ranks > 1 and bool(fields) and not experts,
        "over_all_ranks": ranks == math.prod(of_ranks),
        "replicas_alone": settings.get("sizes.dp"),
        "trains": account.table.content["trains"],
        "buffer_kib": -(-2 * buffer // 1024),
        "packed_nowhere": lacking or step.precision.value == "fp32",
        "unpacked_bytes": f"{unpacked - bits / 8:g}" if isinstance(bits, int) else "",
        "family": family,
        "gated": gated,
        "kernel": attention_of(str(step.attention.value), fields),
        # the clamped SwiGLU of gpt-oss's experts too
        "fusions": [
            name for name in FUSED_BY_COMPILER if name in fused and (name != "swiglu" or gated or experts)
        ],
        "compiled_fusions": [name for name in FUSED_BY_COMPILER if name not in liger or tiles],
        "compiled_by": " ".join(step.compiled.names) or "torch.compile",
        "tile": None,
    }
    if "loss" not in liger and step.loss_tile.value:
        tokens, rows = step.loss_tile.value
        whole = in_text.get("vocab_size") or rows
        facts["tile"] = max(1, tokens * rows // max(whole, rows))
    return facts


def _options_of_zero(options: Mapping[str, Said], hidden: int | None) -> Iterator[tuple[str, Any]]:
    """Yields facts of the options of DeepSpeed's ZeRO, with the numbers by which transformers replaces
    "auto" for a model with that hidden size (None: it is not known)."""
    for name, said in options.items():
        value, note = said.value, ""
        if value == "auto" and hidden:
            factor, power = table_content("transformers")["stage3"][name]
            value, note = factor * hidden**power, f"auto at a hidden size of {hidden}"
        if isinstance(value, int | float):
            yield name, value if isinstance(value, bool) else int(value)
            yield from ((f"{name}.names", [*said.names]), (f"{name}.note", note))


def attention_of(name: str, fields: Mapping[str, Any]) -> str | None:
    """The suite's name of the kernel for a program's word for attention; None for an unknown word. The kernel
    is cuDNN's if FlashAttention-2 would have to pad values. ``fields``: of the model's config.json."""
    shared = table_content("transformers")
    if name in shared["attention_of_torch"] and fields.get("kv_lora_rank"):
        keys = sum(int(fields.get(f"qk_{part}_head_dim") or 0) for part in ("nope", "rope"))
        if keys != fields.get("v_head_dim"):
            return "cudnn"
    kernel: str | None = shared["attention"].get(name)
    return kernel


def _model(account: Account, model: Said, files: JobFiles) -> dict[str, Any]:
    """Set the model by a config.json among the files, else by its name; returns the config.json's fields."""
    configs = [str(file.path) for file in files.models]
    name = configs[0] if configs else model.value
    if not isinstance(name, str) or not name:
        key = next(
            (
                name
                for name in (*model.names, *table_content("transformers")["models"])
                if name in account.program_arguments
            ),
            "",
        )
        given = f", or --given {key}=NAME" if key else ""
        account.problems.append(f"which model it is is not said; give its config.json beside{given}")
        return {}
    try:
        named = named_model(name)
    except UserError as error:
        account.problems.append(
            f"{account.spelled(model.names[0])}: {error}" if model.names and not configs else str(error)
        )
        return {}
    account.set("model", named.model, *model.names, note="the config.json" if configs else "")
    named.account(account, *model.names)
    return named.fields


def _count(account: Account, number: Said, what: str) -> bool:
    if type(number.value) is int and number.value > 0:
        return True
    given = " and ".join(map(account.spelled, filter(account.has, number.names)))
    wrong = f"{given}: {shown(number.value)} is no number of {what}"
    account.problems.append(wrong if given else f"how many {what} there are is not said")
    return False


def _layout(account: Account, step: SimpleNamespace, files: JobFiles) -> int | None:
    """Set strategy and sizes; returns the number of replicas, or None with a problem."""
    account.problems += files.machine_problems(step.gpus.value)
    parts = (
        *((step.sequence, "ranks of a sequence"), (step.tensor, "ranks of a layer"), (step.groups, "groups")),
        *((step.pipeline, "ranks of a pipeline"), (step.experts, "ranks of experts")),
    )
    wrong = [what for number, what in parts if not _count(account, number, what)]
    if wrong:
        return None
    sp, tp, groups, pp, ep = (number.value for number, _ in parts)
    gpus = files.gpus if files.gpus is not None else step.gpus.value
    shared, least = sp * tp * pp, math.lcm(sp * tp * pp * groups, pp * ep)
    fits = type(gpus) is int and gpus > 0 and gpus % least == 0
    table = table_content("transformers")
    options = table["sequences"][step.sequence_by.value] if sp > 1 else {}
    strategies = [*[step.tensor_by.value] * (tp > 1), *filter(None, [options.get("strategy")])]
    split = [step.tensor, step.tensor_by] * (tp > 1) + [step.sequence, step.sequence_by] * (sp > 1)
    account.facts |= {"strategy": "+".join(strategies) or "single", "cut": options.get("placement")}
    account.facts |= {"strategy_keys": [name for each in split for name in each.names]}
    account.facts |= {"summed": options.get("gradients"), "left": gpus // shared if fits else None}
    account.facts |= {"ranks": gpus, "ranks_text": shown(gpus), "shared": shared, "least": least}
    account.facts["tp_plan"] = step.tensor_loss.note == table["fields"]["tensor_loss"]["note"]
    follow(account, table["layout"])
    return gpus // shared if fits else None


def _batch(account: Account, step: SimpleNamespace, replicas: int) -> None:
    micro, parts, total = step.micro_batch, step.accumulation, step.batch
    if micro.value is None and type(total.value) is int:
        micro = Said(total.value // max((parts.value or 1) * replicas, 1), total.names)
    if not _count(account, micro, "sequences of a micro-batch"):
        return
    if total.value is not None and parts.value is None and _count(account, total, "sequences of a step"):
        if total.value % (micro.value * replicas):
            product = f"micro-batch {micro.value} x {replicas} replicas"
            most = total.value // micro.value
            fewer = f"; at most {most} share it" if 1 <= most < replicas else ""
            account.problems.append(f"a batch of {total.value} is no multiple of {product}{fewer}")
            return
        parts = Said(total.value // (micro.value * replicas), total.names)
    elif parts.value is None:
        parts = Said(1, parts.names)
    if not _count(account, parts, "micro-batches"):
        return
    product = f"micro-batch {micro.value} x accumulation {parts.value} x {replicas} replicas"
    if total.value not in (None, micro.value * parts.value * replicas):
        account.problems.append(f"{' and '.join(map(account.spelled, total.names))} is not {product}")
    account.took(f"batch: {micro.value * parts.value * replicas}", *total.names)
    names = [*dict.fromkeys((*micro.names, *parts.names))]
    account.set("batch", micro.value * parts.value * replicas, *names, note=product)
    set_pieces(account, step, parts.value, parts.names)
    if step.packed.value:
        because = "attention over a whole row is counted, at least what its samples need"
        account.stand_in("attention within the samples of a row", "time", because, *step.packed.names)
    account.ignore("a row is one sample", *step.packed.names)


def stages_of(layers: int, each: int | None, ranks: int, several: bool, rounded: str) -> int:
    """The number of stages of ``each`` layers in a pipeline over ``ranks``, ``rounded`` "up" or "down" to a
    multiple of the ranks; without ``each`` a rank has one stage, or two if ``several``."""
    if each is None:
        return ranks * (1 + several)
    stages = -(-layers // max(1, each))
    if rounded == "down":
        return stages - stages % ranks
    return stages + -stages % ranks if rounded == "up" else stages


def set_pipeline(account: Account, step: SimpleNamespace, fields: Mapping[str, Any]) -> None:
    """Set the schedule and the layers of the stages of a pipeline; ``fields``: of the model's config.json."""
    ranks, names = step.pipeline.value, step.pipeline.names
    of_pipelines = (step.schedule, step.stage_layers, step.rounded, step.piece)
    if ranks == 1:
        idle = [name for each in of_pipelines for name in each.names]
        account.ignore("of pipelines, which the job has not", *idle, *names)
        return
    schedules = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}
    schedule = schedules.get(str(step.schedule.value).lower().replace("_", ""))
    layers = fields.get("num_hidden_layers")
    account.set("sizes.pp", ranks, *names)
    if schedule is None:
        account.refuse(f"another schedule of a pipeline than {', '.join(SCHEDULES)}", *step.schedule.names)
        return
    if not isinstance(layers, int):
        return  # the model is not known
    several = schedule == "interleaved"
    stages = stages_of(layers, step.stage_layers.value, ranks, several, str(step.rounded.value))
    if stages % ranks or (stages > ranks) != several or not ranks <= stages <= layers:
        have = f"{layers} layers in {stages} stages"
        account.problems.append(f"{have} are no pipeline of {ranks} ranks by {step.schedule.value}")
        return
    of_stages = (*step.stage_layers.names, *step.rounded.names)
    sizes = stage_layers(layers, stages)
    note = "the first stages have one more"
    set_stages(account, ranks, schedule, sizes, step.schedule.names, of_stages, note)
    account.took(f"{stages} stages", *of_stages)


def set_pieces(account: Account, step: SimpleNamespace, runs: int, names: Sequence[str]) -> None:
    """Set the number of micro-batches of a step: the ``runs`` whose gradients are added up, times the pieces
    into which a pipeline cuts the samples of a run. ``names``: the keys that say ``runs``."""
    local, piece = step.micro_batch.value, step.piece.value
    even = isinstance(local, int) and type(piece) is int and piece > 0 and local % piece == 0
    account.facts |= {
        "local": local,
        "runs": runs,
        "run_keys": [*names],
        "fewer_runs": runs - 1,
        "even": even,
    }
    pieces = local // piece if even else 0
    account.facts |= {"pieces": pieces, "all_pieces": pieces * runs}
    follow(account, table_content("transformers")["pieces"])
