"""The models of torchtitan, by name and flavor, as presets here and what differs from these; matmuls in
eight bits, which torchao makes of their linear layers; and which layers the stages of pipelines have, and in
which order they run micro-batches (torchtitan/distributed/pipeline_parallel.py at 0.2.2 and at b5bcd76c,
distributed/pipeline.py at 0.1.0, and parallelisms/pipelining_utils.py at 3f20451b).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from spbench.bench.tools.jobs.account import Account
from spbench.impls import Model, model_preset

#: of qwen3, what its dense flavors do not share: layers, hidden, heads and inner
_QWEN3 = {"8B": (36, 4096, 32, 12288), "14B": (40, 5120, 40, 17408), "32B": (64, 5120, 64, 25600)}
#: flavors whose embedding and head are one weight, which two units of FSDP gather
TIED = ("debugmodel", "0.6B", "1.7B", "4B")
#: a bias that balances experts, in place of a loss (load_balance_coeff of its MoEArgs)
_BALANCED = {"aux_loss": "none", "aux_weight": 0.0, "router_bias": True, "experts_matmul": "grouped"}
#: rows are multiplied by their scores in float32 where their tokens are (models/moe/moe.py)
_BALANCED["expert_weighting_at"] = "tokens"


class Flavor(NamedTuple):
    """A model: its preset here, options that differ, and a note on the preset."""

    preset: str
    options: Mapping[str, Any] = {}
    note: str = ""


def _qwen3(layers: int, hidden: int, heads: int, inner: int) -> Flavor:
    options = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "inner": inner}
    options |= {} if hidden == 128 * heads else {"head_dim": 128}
    options |= {"vocabulary": 151936, "norm_epsilon": 1e-6, "rotary_base": 1e6, "qk_norm": True}  # type: ignore[dict-item]
    return Flavor("llama3-8b", options, "with the sizes of Qwen3")


FLAVORS: Mapping[str, Mapping[str, Flavor]] = {
    "llama3": {"8B": Flavor("llama3-8b"), "70B": Flavor("llama3-70b"), "405B": Flavor("llama3-405b")},
    "qwen3": {
        **{flavor: _qwen3(*sizes) for flavor, sizes in _QWEN3.items()},
        "30B-A3B": Flavor("qwen3-30b-a3b", _BALANCED),
        "235B-A22B": Flavor("qwen3-235b-a22b", _BALANCED),
    },
    "llama4": {
        "17bx16e": Flavor("llama4-scout", _BALANCED),
        # experts in each second layer
        "17bx128e": Flavor(
            "llama4-scout",
            {**_BALANCED, "experts": 128, "inner": 16384, "expert_inner": 8192, "expert_pattern": [0, 1]},
            "with the sizes of Maverick",
        ),
    },
    "deepseek_v3": {
        "16B": Flavor("deepseek-v2-lite", _BALANCED),
        "236B": Flavor("deepseek-v2", _BALANCED),
        "671B": Flavor("deepseek-v3", {**_BALANCED, "mtp_layers": 0}),
    },
    "gpt_oss": {"20b": Flavor("gpt-oss-20b", _BALANCED), "120b": Flavor("gpt-oss-120b", _BALANCED)},
}


class TorchtitanModel:
    """The model of a job, from its keys.

    Attributes:
        keys: the account of them.
        version: one letter of the versions of its table.
        preset: the model, with the options of its flavor.
        stages: ranks of a pipeline.
    """

    keys: Account
    version: str
    preset: Model
    stages: int

    @property
    def recent(self) -> bool:
        """Whether the version is 0.2.2 or newer."""
        return self.version in ("c", "d")

    def named(self, key: str) -> str:
        """The whole name of a key, whose section has changed."""
        return next(name for name in self.keys.program_arguments if name.rpartition(".")[2] == key)

    def value(self, name: str, otherwise: Any) -> Any:
        """The value of a key, or ``otherwise`` where this version has none of that name."""
        return self.keys.value(name) if name in self.keys.program_arguments else otherwise

    def set_model(self) -> None:
        """Set the model, its sizes and how torchtitan makes its layers."""
        k, names = self.keys, ("model.name", "model.flavor")
        name, flavor = map(k.value, names)
        flavors = FLAVORS.get(name, {})
        if not flavors or (name != "llama3" and not self.recent):
            k.refuse(f"another model than {', '.join(FLAVORS)} (0.2.2 and later) and llama3", "model.name")
        elif name == "qwen3" and flavor in TIED:
            k.refuse("one weight of embedding and head in two units of FSDP", "model.flavor")
        elif flavor not in flavors:
            k.refuse(f"another flavor of {name} than {', '.join(flavors)}", "model.flavor")
        flavors = flavors or FLAVORS["llama3"]
        model = flavors.get(flavor, next(iter(flavors.values())))
        self.preset = model_preset(model.preset, model.options)
        k.set("model", model.preset, *names, note=model.note)
        for option, value in model.options.items():
            k.set(f"model_options.{option}", value, "model.flavor")
        if not getattr(self.preset, "kv_lora_rank", 0):
            note = "wq, wk, wv and w1, w3 are layers of their own"
            k.set("model_options.separate_projections", True, note=note)
        self._attention()
        if self.recent:
            return
        own = ["model.norm_type"] if self.version == "a" else []
        norm = self.value("model.norm_type", "rmsnorm")
        if norm not in ("rmsnorm", "fused_rmsnorm"):
            k.refuse("layer norms without a bias", *own)
        one_kernel = norm == "fused_rmsnorm" or k.value("training.compile")
        way, note = "fused" if one_kernel else "plain", "" if own else "operator by operator"
        k.set("model_options.rms_norm", way, *own, note=note)

    @property
    def experts(self) -> int:
        """How many experts a layer of the model has; 0: none."""
        return int(getattr(self.preset, "experts", 0))

    def _attention(self) -> None:
        k, asked = self.keys, "model.attn_backend"
        flexible = self.experts and k.value("model.name") in ("gpt_oss", "deepseek_v3")
        if self.value(asked, "") not in ("", "sdpa") or flexible:
            k.leave("time", "attention is FlexAttention or of variable lengths, not FlashAttention", asked)
            k.approximate("attention is FlashAttention's, where theirs is another kernel")
        k.set(
            "model_options.attention",
            # FlashAttention takes no values whose heads are of another size than keys'
            "cudnn" if self.preset.of_one_head_size else "flash_attention_2",
            *([asked] if self.version == "d" else []),
            note="torch's scaled_dot_product_attention",
        )
        if self.value(predicted := "model.num_mtp_layers", 0):
            k.set("model_options.mtp_layers", k.value(predicted), predicted)

    def set_experts(self, tensor: int, tp_name: str) -> None:
        """Set over how many ranks experts are spread, and each of them split."""
        k, kinds = self.keys, ("expert_parallel_degree", "expert_tensor_parallel_degree")
        ranks_name, parts_name = (f"parallelism.{kind}" for kind in kinds)
        forced = "debug.moe_force_load_balance"
        if not self.experts:
            k.ignore("of layers with experts, which the model has not", ranks_name, parts_name, forced)
            return
        ranks, parts = k.count(ranks_name), self.value(parts_name, 1)
        if ranks > 1:
            k.set("sizes.ep", ranks, ranks_name)
        if parts not in (1, tensor):
            k.problems.append(f"{parts_name} {parts} is neither 1 nor {tp_name} {tensor}")
        elif ranks == 1 and self.version == "c" and tensor > 1:
            k.set("sizes.etp", tensor, tp_name, note="experts are split as all layers are")
            k.ignore("without expert parallelism experts are split as all layers are", parts_name)
        elif parts > 1:
            k.set("sizes.etp", parts, parts_name)
        if self.value(forced, False):
            k.set("model_options.routing", "round_robin", forced)
        k.ignore("one part: not split", ranks_name, parts_name)
        k.approximate("rows of an expert are not padded to a multiple of 8 or 16")


_SECTION = "parallelism.pipeline_parallel_"
#: by torch's name of a schedule: ours
SCHEDULES: Mapping[str, str] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
_PER_STAGE = f"{_SECTION}layers_per_stage"
LESS = (f"{_SECTION}first_stage_less_layers", f"{_SECTION}last_stage_less_layers")
#: by version: how many micro-batches there are
_NUMBERS = {"a": "experimental.pipeline_parallel_microbatches", "d": "parallelism.num_pp_microbatches"}
_SIZE = f"{_SECTION}microbatch_size"
#: the last words of keys
_SCHEDULE, _POINTS = "pipeline_parallel_schedule", "pipeline_parallel_split_points"
_ELSEWHERE = ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part")
_OTHERS = (_SIZE, *_NUMBERS.values(), *LESS, _PER_STAGE)


def stage_layers(layers: int, stages: int, first: int, last: int) -> list[int]:
    """How many layers each stage has where the embedding counts as ``first`` of them, norm and output as
    ``last``; empty where there are too few."""
    each, more = divmod(layers + first + last, stages)
    if max(first, last, 1) > each:
        return []
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes


def first_stage_layers(layers: int, stages: int) -> list[int]:
    """How many layers each stage has in December 2024, where stages after the first take one more until what
    is left is the last's."""
    each, more = divmod(layers, stages)
    sizes = [each, *(each + (stage < more) for stage in range(stages - 2))]
    return [*sizes, layers - sum(sizes)] if each and stages > 1 else []


def split_layers(points: list[str] | str, layers: int) -> list[int]:
    """How many layers each stage has of which all but the first begin at these; empty: they cannot."""
    names = points.split(",") if isinstance(points, str) else points
    begins = [0, *(int(digits) if (digits := name.rpartition(".")[2]).isdecimal() else -1 for name in names)]
    sizes = [after - before for before, after in zip(begins, [*begins[1:], layers], strict=True)]
    return sizes if min(sizes) > 0 else []


def set_pipeline(job: TorchtitanModel, ranks: int, ranks_name: str) -> None:
    """Set the schedule of a pipeline over ``ranks``, and the layers of its stages."""
    k = job.keys
    last_words = (_SCHEDULE, _POINTS, *_ELSEWHERE)
    keys = [name for name in k.program_arguments if name.rpartition(".")[2] in last_words or name in _OTHERS]
    if ranks == 1:
        k.ignore("of pipelines, which the job has not", *keys)
        return
    schedule_name = job.named(_SCHEDULE)
    name = str(k.value(schedule_name))
    schedule = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}.get(name.lower())
    for elsewhere in keys:
        if elsewhere.rpartition(".")[2] in _ELSEWHERE and k.value(elsewhere):
            k.refuse("stages or a schedule that are written out", elsewhere)
    if schedule is None:
        k.refuse(f"another schedule than {', '.join(SCHEDULES)}", schedule_name)
        return
    sizes, names, note = _stages(job, ranks, several=schedule == "interleaved")
    stages = len(sizes)
    if not sizes:
        return
    if stages % ranks or (stages == ranks) != (schedule != "interleaved"):
        words = " and ".join(map(k.spelled, filter(k.has, names))) or schedule_name
        k.problems.append(f"{words} makes {stages} stages, which {name} cannot run on {ranks}")
        return
    k.set("training.schedule", schedule, schedule_name)
    if stages > ranks:
        k.set("training.virtual_stages", stages // ranks, schedule_name, *names)
        # torch.distributed.pipelining starts its sends and goes on
        k.set("training.overlap_p2p_communication", True, schedule_name, note="sends are waited for late")
    if len({*sizes}) > 1:
        k.set("training.stage_layers", sizes, *names, note=note)
    k.took(f"{stages} stages", *keys)


def _stages(job: TorchtitanModel, ranks: int, *, several: bool) -> tuple[list[int], list[str], str]:
    """The layers of each stage, the keys that say so, and in which way; none, and a problem, where they are
    too few. ``several``: a rank has more than one stage."""
    k, layers = job.keys, int(getattr(job.preset, "layers", 0))
    points = next((name for name in k.program_arguments if name.rpartition(".")[2] == _POINTS), "")
    stages, ends, names = ranks * (1 + several), (0, 0), [points]
    if points and (given := k.value(points)):
        sizes, note = split_layers(given, layers), ""
    elif job.version == "a":
        sizes, note, names = first_stage_layers(layers, stages), "the middle stages have one more", []
    else:
        first, last = (int(job.value(less, 1) or 0) for less in LESS)
        ends = first, last
        if (each := k.value(_PER_STAGE)) is not None:
            stages = -(-(layers + sum(ends)) // max(1, each))
        sizes, note = (
            stage_layers(layers, stages, *ends),
            "the embedding, and norm and output, count as layers",
        )
        names = [name for name in (*LESS, _PER_STAGE) if name in k.given]
    if not sizes:
        which = f", {ends[0]} and {ends[1]} for the ends," if any(ends) else ""
        k.problems.append(
            f"{layers} layers{which} are too few for {stages} stages, or a split point names no layer"
        )
    return sizes, names, note


def micro_batches(job: TorchtitanModel, local: int) -> tuple[int, str]:
    """How many micro-batches a pipeline runs at once of ``local`` samples of a rank, and the key that says
    it; 1 with a problem where that does not divide them."""
    k = job.keys
    name = _NUMBERS.get(job.version, _SIZE)
    if job.version == "d":
        return k.count(name), name
    divisor = job.stages if k.value(name) is None else k.count(name)
    if local % divisor:
        batch = "batch_size" if job.version == "a" else "local_batch_size"
        k.problems.append(f"training.{batch} {local} is no multiple of {name} {divisor}")
        return 1, name
    return divisor if job.version == "a" else local // divisor, name


#: converters that make linear layers multiply in eight bits, and sections: their names in the versions
_LINEAR = ("quantize.linear.float8", "float8")
_SWITCH, _CONVERTERS = "float8.enable_float8_linear", "model.converters"
#: which torchtitan reads where layers are converted
_KEYS = (
    *("recipe_name", "filter_fqns", "enable_fsdp_float8_all_gather"),
    *("precompute_float8_dynamic_scale_for_fsdp", "scaling_type_input", "scaling_type_weight"),
    "scaling_type_grad_output",
)


def set_fp8(k: Account, *, experts: bool) -> None:
    """Set the recipe of matmuls in eight bits, if a job has them; refuse other converters.

    Args:
        experts: the model has some, beside which no layer is in eight bits here.
    """
    keys = _keys(k)
    if _SWITCH in k.program_arguments:
        converted, switch = k.value(_SWITCH), _SWITCH
    else:
        converted, switch = k.value(_CONVERTERS), _CONVERTERS
        if [each for each in converted if each not in _LINEAR]:
            k.refuse("what converters make of layers (matmuls in eight bits of another kind)", switch)
            return
    if not converted:
        k.ignore("no layer is converted to matmuls in eight bits", *keys.values())
        return
    if experts:
        because = "all matmuls are in sixteen bits, which take up to twice as long"
        missing = "linear layers in eight bits beside experts in torchao"
        k.stand_in(missing, "time and memory", because, switch)
        k.ignore("no layer is in eight bits", *keys.values())
        return
    recipe = keys.get("recipe_name")
    name = (k.value(recipe) if recipe else None) or "tensorwise"
    k.set("model_options.fp8", name, switch, *([recipe] if recipe else []))
    for each in filter(k.has, (name for key, name in keys.items() if key.startswith("scaling_type"))):
        if k.value(each) == "delayed":
            k.refuse("scales from earlier steps in torchao", each)
        k.took("scales of the tensor itself", each)
    _leave(k, keys)


def _keys(k: Account) -> dict[str, str]:
    """The keys of a job's version, by their last part."""
    names = ((key, f"{section}.{key}") for section in _LINEAR for key in _KEYS)
    return {key: name for key, name in names if name in k.program_arguments}


def _leave(k: Account, keys: dict[str, str]) -> None:
    """Say what is not modelled of them."""
    if (filtered := keys.get("filter_fqns")) is not None:
        if k.value(filtered) == ["output"]:
            k.took("the head stays as it is", filtered)
        else:
            because = "each projection of a layer is in eight bits, and the head is not"
            k.stand_in("a choice of layers for eight bits", "time", because, filtered)
    gathered = keys["enable_fsdp_float8_all_gather"]
    if k.value(gathered):
        k.leave("time and memory", "weights are gathered in sixteen bits and cast then", gathered)
    k.ignore("each cast of a weight computes its scale", keys["precompute_float8_dynamic_scale_for_fsdp"])
