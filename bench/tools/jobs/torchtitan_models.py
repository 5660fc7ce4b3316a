"""Models, pipelines and registries of torchtitan. Its models, by name and flavor, become presets of spbench
with options. The layers of a pipeline's stages and its schedules follow
torchtitan/distributed/pipeline_parallel.py at 0.2.2 and at b5bcd76c, distributed/pipeline.py at 0.1.0, and
parallelisms/pipelining_utils.py at 3f20451b. A registry, which is Python that makes configurations, is
translated to the sections of a TOML without running the Python.
"""

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.tools.jobs import python_values
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job_files import JobFile
from spbench.bench.tools.jobs.rules import call
from spbench.impls import Model, model_preset


def models() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """The models of torchtitan by name and flavor, each with a ``preset``, ``options`` and a ``note``."""
    flavors: Mapping[str, Mapping[str, Mapping[str, Any]]] = table_content("torchtitan")["flavors"]
    return flavors


class TorchtitanModel:
    """The part of a job's translation that sets the model.

    Attributes:
        keys: the account of the job's keys.
        version: the letter of the table's version that the job's keys fit best.
        preset: the model, with the options of its flavor.
        stages: the number of ranks of the pipeline.
    """

    keys: Account
    version: str
    preset: Model
    stages: int

    @property
    def recent(self) -> bool:
        """Whether the version is 0.2.2 or newer."""
        return self.version >= "c"

    def named(self, key: str) -> str:
        """The whole name of a key whose section differs between versions."""
        return next(name for name in self.keys.program_arguments if name.rpartition(".")[2] == key)

    def value(self, name: str, otherwise: Any) -> Any:
        """The value of a key; ``otherwise`` if this version has no key of that name."""
        return self.keys.value(name) if name in self.keys.program_arguments else otherwise

    def set_model(self) -> None:
        """Set the model, its sizes, and the options by which its layers are those of torchtitan."""
        account, names = self.keys, ("model.name", "model.flavor")
        name, flavor = map(account.value, names)
        known = models()
        flavors = known.get(name, {})
        account.facts |= {
            "unknown_model": not flavors or (name != "llama3" and not self.recent),
            "unknown_flavor": flavor not in flavors,
            "flavors": ", ".join(flavors),
        }
        call(account, "model")
        flavors = flavors or known["llama3"]
        model = flavors.get(flavor, next(iter(flavors.values())))
        self.preset = model_preset(model["preset"], model.get("options", {}))
        account.set("model", model["preset"], *names, note=model.get("note", ""))
        for option, value in model.get("options", {}).items():
            account.set(f"model_options.{option}", value, "model.flavor")
        account.facts |= {
            "experts": self.experts,
            "latents": getattr(self.preset, "kv_lora_rank", 0),
            "kernel": "cudnn" if self.preset.of_one_head_size else "flash_attention_2",
        }
        call(account, "layers")

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 in a model without experts."""
        return int(getattr(self.preset, "experts", 0))


_SECTION = "parallelism.pipeline_parallel_"
#: our name of a schedule, by torch's name
SCHEDULES: Mapping[str, str] = {"1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved"}
_PER_STAGE = f"{_SECTION}layers_per_stage"
LESS = (f"{_SECTION}first_stage_less_layers", f"{_SECTION}last_stage_less_layers")
#: the key that says how many micro-batches there are, by version
_NUMBERS = {"a": "experimental.pipeline_parallel_microbatches", "d": "parallelism.num_pp_microbatches"}
_SIZE = f"{_SECTION}microbatch_size"
#: names of keys without their section
_SCHEDULE, _POINTS = "pipeline_parallel_schedule", "pipeline_parallel_split_points"
_ELSEWHERE = ("pipeline_parallel_schedule_csv", "module_fqns_per_model_part")
_OTHERS = (_SIZE, *_NUMBERS.values(), *LESS, _PER_STAGE)


def stage_layers(layers: int, stages: int, first: int = 0, last: int = 0) -> list[int]:
    """The number of layers of each stage, if the embedding counts as ``first`` layers, and norm and output
    count as ``last``; empty if there are too few layers."""
    each, more = divmod(layers + first + last, stages)
    if max(first, last, 1) > each:
        return []
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= first
    sizes[-1] -= last
    return sizes


def first_stage_layers(layers: int, stages: int) -> list[int]:
    """The number of layers of each stage by torchtitan of December 2024: layers that do not divide evenly go
    to the stages after the first, one each, and the last stage has the rest."""
    each, more = divmod(layers, stages)
    sizes = [each, *(each + (stage < more) for stage in range(stages - 2))]
    return [*sizes, layers - sum(sizes)] if each and stages > 1 else []


def split_layers(points: list[str] | str, layers: int) -> list[int]:
    """The number of layers of each stage if the stages after the first begin at the layers ``points``; empty
    if a stage would have no layer."""
    names = points.split(",") if isinstance(points, str) else points
    begins = [0, *(int(digits) if (digits := name.rpartition(".")[2]).isdecimal() else -1 for name in names)]
    sizes = [after - before for before, after in zip(begins, [*begins[1:], layers], strict=True)]
    return sizes if min(sizes) > 0 else []


def set_pipeline(job: TorchtitanModel, ranks: int, ranks_name: str) -> None:
    """Set the schedule of a pipeline over ``ranks`` (key ``ranks_name``) and the layers of its stages."""
    account = job.keys
    last_words = (_SCHEDULE, _POINTS, *_ELSEWHERE)
    keys = [
        name for name in account.program_arguments if name.rpartition(".")[2] in last_words or name in _OTHERS
    ]
    if ranks == 1:
        account.ignore("of pipelines, which the job has not", *keys)
        return
    schedule_name = job.named(_SCHEDULE)
    name = str(account.value(schedule_name))
    schedule = {theirs.lower(): ours for theirs, ours in SCHEDULES.items()}.get(name.lower())
    for elsewhere in keys:
        if elsewhere.rpartition(".")[2] in _ELSEWHERE and account.value(elsewhere):
            account.refuse("stages or a schedule that are written out", elsewhere)
    if schedule is None:
        account.refuse(f"another schedule than {', '.join(SCHEDULES)}", schedule_name)
        return
    sizes, names, note = _stages(job, ranks, several=schedule == "interleaved")
    stages = len(sizes)
    if not sizes:
        return
    if stages % ranks or (stages == ranks) != (schedule != "interleaved"):
        words = " and ".join(map(account.spelled, filter(account.has, names))) or schedule_name
        account.problems.append(f"{words} makes {stages} stages, which {name} cannot run on {ranks}")
        return
    set_stages(account, ranks, schedule, sizes, [schedule_name], names, note)
    account.took(f"{stages} stages", *keys)


def set_stages(
    account: Account,
    ranks: int,
    schedule: str,
    sizes: Sequence[int],
    of_schedule: Sequence[str],
    of_stages: Sequence[str],
    note: str,
) -> None:
    """Set the schedule of a pipeline over ``ranks`` and the layers of its stages (``sizes``).

    Args:
        of_schedule, of_stages: the keys from which the schedule comes, and the stages.
        note: the rule of sizes that differ, for the setting's comment.
    """
    account.set("training.schedule", schedule, *of_schedule)
    if len(sizes) > ranks:
        account.set("training.virtual_stages", len(sizes) // ranks, *of_schedule, *of_stages)
        # torch.distributed.pipelining starts its sends and goes on
        late = "sends are waited for late"
        account.set("training.overlap_p2p_communication", True, *of_schedule, note=late)
    if len({*sizes}) > 1:
        account.set("training.stage_layers", sizes, *of_stages, note=note)


def _stages(job: TorchtitanModel, ranks: int, *, several: bool) -> tuple[list[int], list[str], str]:
    """The number of layers of each stage, the keys that say it, and a note on the rule; no stages, and a
    problem, if there are too few layers. ``several``: whether a rank has more than one stage."""
    account, layers = job.keys, int(getattr(job.preset, "layers", 0))
    points = next((name for name in account.program_arguments if name.rpartition(".")[2] == _POINTS), "")
    stages, ends, names = ranks * (1 + several), (0, 0), [points]
    if points and (given := account.value(points)):
        sizes, note = split_layers(given, layers), ""
    elif job.version == "a":
        sizes, note, names = first_stage_layers(layers, stages), "the middle stages have one more", []
    else:
        first, last = (int(job.value(less, 1) or 0) for less in LESS)
        ends = first, last
        if (each := account.value(_PER_STAGE)) is not None:
            stages = -(-(layers + sum(ends)) // max(1, each))
        sizes = stage_layers(layers, stages, *ends)
        note = "the embedding, and norm and output, count as layers"
        names = [name for name in (*LESS, _PER_STAGE) if name in account.given]
    if not sizes:
        which = f", {ends[0]} and {ends[1]} for the ends," if any(ends) else ""
        account.problems.append(
            f"{layers} layers{which} are too few for {stages} stages, or a split point names no layer"
        )
    return sizes, names, note


def micro_batches(job: TorchtitanModel, local: int) -> tuple[int, str]:
    """The number of micro-batches in which a pipeline runs a rank's ``local`` samples, and the key that says
    the number; 1, and a problem, if the samples do not divide evenly."""
    account = job.keys
    name = _NUMBERS.get(job.version, _SIZE)
    if job.version == "d":
        return account.count(name), name
    divisor = job.stages if account.value(name) is None else account.count(name)
    if local % divisor:
        batch = "batch_size" if job.version == "a" else "local_batch_size"
        account.problems.append(f"training.{batch} {local} is no multiple of {name} {divisor}")
        return 1, name
    return divisor if job.version == "a" else local // divisor, name


def registered(file: JobFile) -> dict[str, Any] | None:
    """The sections, as in a TOML, of the configuration of torchtitan that a Python file makes; None if the
    file makes no configuration.

    Raises:
        UserError: the file is no Python, makes several configurations of which its ``part`` names none, or
            has a value that is not plain.
    """
    functions = {
        f.name: f for f in python_values.syntax_of(file).body if isinstance(f, ast.FunctionDef) and _makes(f)
    }
    if not functions:
        return None
    function = python_values.chosen_function(file, functions)
    name = next((model for model in _registry()["models"] if function.startswith(model)), None)
    content: dict[str, Any] = {"model": {} if name is None else {"name": name}}
    for key, node in python_values.MakingFunctions(file, functions).keys(function).items():
        section, dot, inner = key.partition(".")
        if section == "model_spec" and isinstance(node, ast.Call) and len(node.args) == 1:
            content["model"] |= dict(_of_model(file, node))
        elif key == "hf_assets_path":
            content["model"][key] = _plain(file, node)
        elif key == "activation_checkpoint" and isinstance(node, ast.Constant) and node.value is None:
            content[key] = {"mode": "none"}
        elif dot:
            _add_section(file, content, section, "", {inner: node})
        elif isinstance(node, ast.Call):
            kind = ast.unparse(node.func).partition(".")[0]
            _add_section(file, content, section, kind, python_values.keywords(file, node))
        else:
            content[key] = _plain(file, node)
    return content


def _registry() -> Mapping[str, Any]:
    registry: Mapping[str, Any] = table_content("torchtitan")["registry"]
    return registry


def _makes(function: ast.FunctionDef) -> bool:
    """Whether a function returns a configuration of torchtitan."""
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    returned = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    annotated = function.returns is not None and ast.unparse(function.returns) == python_values.CONFIGURATION
    return returned == python_values.CONFIGURATION or (annotated and isinstance(last, ast.Return))


def _of_model(file: JobFile, call: ast.Call) -> Iterator[tuple[str, Any]]:
    yield "flavor", _plain(file, call.args[0])
    for key, node in python_values.keywords(
        file, ast.Call(call.func, [], call.keywords, lineno=call.lineno)
    ).items():
        if key == "converters" and isinstance(node, ast.List):
            yield key, [ast.unparse(each).partition(".")[0] for each in node.elts]
        else:
            yield key, _plain(file, node)


def _add_section(
    file: JobFile, content: dict[str, Any], name: str, kind: str, given: Mapping[str, ast.expr]
) -> None:
    """Add the keys ``given`` of a section under the section's name in TOML, with the keys that the class
    ``kind`` sets by itself."""
    above, _, inner = _registry()["renamed"].get(name, name).partition(".")
    section: dict[str, Any] = {}
    if name == "loss":
        given = {key: node for key, node in given.items() if not key.startswith(("loss_fn", "global_"))}
    for key, node in given.items():
        if name not in _registry()["idle"] or not python_values.is_unknown(python_values.value_of(node, {})):
            section[key] = _plain(file, node)
    if inner and "dataset" in section:
        content.setdefault(above, {})["dataset"] = section.pop("dataset")
    place = content.setdefault(above, {})
    (place.setdefault(inner, {}) if inner else place).update(
        {**_registry()["classes"].get(kind, {}), **section}
    )


def _plain(file: JobFile, node: ast.expr) -> Any:
    """The plain value of a node; UserError if only a run could tell the value."""
    value = python_values.value_of(node, {})
    if not python_values.is_unknown(value):
        return value
    text = ast.unparse(node)
    shown = text if len(text) <= 40 else f"{text[:37]}..."
    raise file.wrong(f"line {node.lineno}: {shown} is no plain value; write it out")
