"""What a command line asks about: its options, and the kind of thing that its words name; a file of a cluster
with changed figures, so that workers and scenarios can name that cluster; and the layout that a job or a
scenario already has, with the options that every other layout keeps."""

import hashlib
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import cache_folder, read_file, write_whole
from spbench.bench.measure import ASKED, Cluster, given_once, load_cluster, names, written
from spbench.bench.measure import given as set_to
from spbench.bench.setting_values import CONFIG, names_a_file, remote_name
from spbench.bench.tools.choose.suggestions import dotted
from spbench.bench.tools.jobs.flags import several_ranks
from spbench.bench.tools.jobs.job_files import given_values, path_and_part
from spbench.bench.tools.jobs.python_values import makes_configurations
from spbench.bench.yaml_files import SUFFIXES, packaged, read_yaml, validate
from spbench.bench.yaml_text import dump
from spbench.impls import SUFFIX as PYTHON
from spbench.impls import backend_class, published_model, published_models, set_options

#: a mapping with this key is a scenario
_OF_SCENARIOS = "groups"
#: fields of a Hugging Face config.json, of which other JSON files of jobs have none
_OF_CONFIGS = ("model_type", "architectures")
#: options of commands that are settings of a cell by their own names; others of numbers are ranks along axes
_OF_SHAPE = ("seq_len", "batch")


@dataclass(frozen=True)
class Asked:
    """The options of a command line that choose or change cells.

    Attributes:
        settings: new values of the cells' settings, by dotted name.
        micro_batch: samples of a micro-batch; the number of micro-batches follows from the batch.
        where, variant: see :class:`Narrowing`; only for scenarios.
        given: values, by name, of variables that the files of a job leave to run time.
    """

    cluster: str | None = None
    gpus: int | None = None
    strategy: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    micro_batch: int | None = None
    where: Sequence[tuple[str, str]] = ()
    variant: str | None = None
    given: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, changes: Sequence[tuple[str, str]] = (), given: Sequence[str] = (), **options: Any) -> Self:
        """The options by the names that commands give them; ``changes`` are those of --set, and ``options``
        that are no attributes here are settings: seq_len, batch, and ranks along axes."""
        own = {name: options.pop(name) for name in [*options] if name not in cls.__dataclass_fields__}
        paths = {name if name in _OF_SHAPE else f"sizes.{name}": size for name, size in own.items()}
        settings = {path: size for path, size in paths.items() if size is not None} | set_to(changes)
        return cls(settings=settings, given=given_values(given), **options)


def kind_of(words: Sequence[str]) -> Literal["scenario", "model", "job"]:
    """The kind of thing that the words of a command line name.

    Raises:
        UserError: the words name no scenario, model or file.
    """
    (first, *others) = words
    if not others and _is_scenario(first):
        return "scenario"
    if not others and _is_model(first) and not makes_configurations(first):
        return "model"
    if missing := [word for word in words if not path_and_part(word)[0].is_file()]:
        published = (each.name for each in published_models())
        known_names = [*packaged("spbench.scenarios"), *names("model"), *published]
        hint = suggestion(missing[0], known_names, "spbench list scenarios, spbench list models")
        hint = remote_name(missing[0]) or ("" if Path(missing[0]).suffix or others else hint)
        raise UserError(f"{shown(missing[0])} is no scenario, model or file{hint}")
    return "job"


def _is_scenario(word: str) -> bool:
    if word in packaged("spbench.scenarios"):
        return True
    path = Path(word).expanduser()
    if path.suffix not in SUFFIXES or not path.is_file():
        return False
    try:
        return _OF_SCENARIOS in read_yaml(path)
    except UserError:  # if this is a job's file, its reader says what is wrong
        return False


def _is_model(word: str) -> bool:
    if word in names("model") or PYTHON in word:
        return True
    path = Path(word).expanduser()
    if (path / CONFIG).is_file():
        return True
    if not names_a_file(word) or not path.is_file():
        return not path.exists() and published_model(word) is not None
    text = read_file(path).decode(errors="replace")
    return path.suffix == ".json" and any(f'"{name}"' in text for name in _OF_CONFIGS)


def ask_for(needed: Mapping[str, Any], model: str) -> None:
    """Raise one error for all options that a model needs and that are missing.

    Args:
        needed: values by flag, such as ``--seq-len N``; None: missing.

    Raises:
        UserError: a value is None.
    """
    if missing := [flag for flag, value in needed.items() if value is None]:
        flags = ", ".join(missing[:-1]) + " and " * (len(missing) > 1) + missing[-1]
        hint = "; spbench list clusters has the names" if "--cluster NAME" in missing else ""
        raise UserError(f"{model} is a model: give {flags} too{hint}")


#: parts of a cluster's file whose figures can be changed
PARTS = ("device", "node_link", "network", "nccl", "host", "host_memory")
#: a factor such as x2, by which a figure is multiplied; and a range of factors, each twice the one before
_FACTOR = re.compile(r"x(\d*\.?\d+)")
_FACTORS = re.compile(r"x(\d*\.?\d+)\.\.x?(\d*\.?\d+)")
#: the most doublings in a range of factors
_MOST = 64


def is_figure(name: str) -> bool:
    """Whether a dotted name may be the name of a cluster's figure."""
    part, separator, _ = name.partition(".")
    return bool(separator) and part in PARTS


def values_of(text: str) -> list[str]:
    """The values that a text stands for: ``x0.5..x4`` is x0.5 and its doublings up to x4; else the text.

    Raises:
        UserError: the range has no values, or too many.
    """
    if (match := _FACTORS.fullmatch(text)) is None:
        return [text]
    first, last = float(match[1]), float(match[2])
    if not 0 < first <= last <= first * 2.0**_MOST:
        raise UserError(f"{text}: give factors above 0, the smaller first, as x0.5..x4")
    values = [first]
    while values[-1] * 2 <= last * (1 + 1e-9):
        values.append(values[-1] * 2)
    return [f"x{value:g}" for value in values]


def swept_figures(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """The changed figures of each cluster, from (figure, text) pairs: one mapping for each value of a range.

    Raises:
        UserError: a name is given twice, or a range has no values.
    """
    values = {name: values_of(text) for name, text in given_once("--set", pairs).items()}
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def changed_cluster(name: str, figures: Mapping[str, str]) -> str:
    """Write the file of a cluster with some figures changed; returns its path.

    If a figure of a link is changed, the measured rates of collectives on that link change by the same
    factor. The file is in the cache folder, or in a temporary folder if there is no cache.

    Args:
        figures: a number, or a factor such as ``x2``, by dotted name such as
            ``network.bandwidth_bytes_per_s``.

    Raises:
        UserError: the cluster has no such figure, or a value is no number or factor.
    """
    cluster = load_cluster(name)
    content = cluster.content
    for figure, text in figures.items():
        _change(content, cluster.name, figure, text)
    said = ", ".join(f"{figure} {text}" for figure, text in figures.items())
    content["about"] = f"{cluster.name} with {said}"
    text = dump(content)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = [cluster.name, *(f"{figure.rpartition('.')[2]}-{value}" for figure, value in figures.items())]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join([*words, digest]))
    validate(Cluster, {**content, "name": stem}, f"--set {said}")
    kept = cache_folder()
    folder = Path(tempfile.mkdtemp(prefix="spbench-clusters-")) if kept is None else kept / "clusters"
    return str(write_whole(folder / f"{stem}.yaml", text))


def _change(content: dict[str, Any], cluster: str, figure: str, text: str) -> None:
    places = dict(_figures(content, ""))
    if figure not in places:
        part = figure.partition(".")[0]
        figures = [name for name in places if name.startswith(f"{part}.")]
        raise UserError(f"--set {figure}: cluster {cluster} has no such figure{suggestion(figure, figures)}")
    holder, key = places[figure]
    before = holder[key]
    factor = _FACTOR.fullmatch(text)
    try:
        times = float(factor[1]) if factor else float(text) / before if before else None
        value = before * times if factor and before is not None else float(text.removeprefix("x"))
    except ValueError:
        raise UserError(f"--set {figure}={text}: give a number, or a factor as x2") from None
    if factor and before is None:
        raise UserError(f"--set {figure}={text}: cluster {cluster} has no number there to multiply; give one")
    if not 0 <= value < float("inf"):
        raise UserError(f"--set {figure}={text}: give a number from 0 on")
    part, leaf = figure.partition(".")[0], figure.rpartition(".")[2]
    alike = [name for name in places if name.startswith(f"{part}.collectives.") and name.endswith(f".{leaf}")]
    for name in [figure, *(alike if figure == f"{part}.{leaf}" and times is not None else [])]:
        holder, key = places[name]
        number = value if name == figure else (holder[key] or 0.0) * (times or 1.0)
        holder[key] = round(number) if isinstance(holder[key], int) else number
        if "source" in holder:
            holder["note"] = "; ".join(filter(None, [holder.get("note"), f"{text}, {ASKED}"]))


def _figures(part: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The numbers of a part of a cluster's file: (dotted name, (the mapping or list that holds a number, its
    key))."""
    entries = enumerate(part) if isinstance(part, list) else part.items()
    for key, value in entries:
        name = f"{path}{key}"
        if isinstance(value, dict) and "source" in value and "value" in value:
            if value["value"] is None or isinstance(value["value"], int | float):
                yield name, (value, "value")
        elif isinstance(value, dict | list):
            yield from _figures(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, (part, key)


#: how names of a model's memory-saving options begin or end; a search chooses these options again
_SWITCHES, _TILES = ("recompute", "checkpoint"), "_tile"
#: options of a backend that a search chooses again: numbers of ranks, choices that are other backends here,
#: and options of an optimizer on the host
_CHOSEN = {
    *("data_parallel_replicate_degree", "num_distributed_optimizer_instances", "gradients"),
    *("optimizer_offload_fraction", "use_precision_aware_optimizer"),
}
#: settings of ``training`` that say which steps are measured
_OF_MEASUREMENT = {"steps", "moments"}


@dataclass(frozen=True)
class OwnLayout:
    """The layout that a job or scenario already has, which a search compares with other layouts.

    Attributes:
        cell: the cell of the job or scenario.
        kept: options of the cell's backend, which each layout keeps if its own backend has them.
        released: options of the cell's model that other layouts choose again.
        job: the kind of job that the cell was read from; "": no job.
    """

    cell: Cell
    kept: Mapping[str, Any]
    released: Mapping[str, Any]
    job: str = ""

    @classmethod
    def of(cls, cell: Cell, said: Mapping[str, Any], job: str = "") -> Self:
        """The layout of a cell.

        Args:
            said: settings, by dotted name, that the user gives for every layout.
        """
        released = {
            name: value
            for name, value in cell.model_options.items()
            if (name.startswith(_SWITCHES) or name.endswith(_TILES)) and f"model_options.{name}" not in said
        }
        return cls(cell, _kept(cell.training), released, job)

    @property
    def looked_at(self) -> Cell:
        """The cell in the form of a search's cells: one measured step, with Adam's moments, and the strategy
        "single" if the cell's strategy divides nothing."""
        content = self.cell.training.model_dump(exclude_defaults=True, exclude=_OF_MEASUREMENT)
        update: dict[str, Any] = {"training": TrainingOptions.model_validate(content), "variant": ""}
        if several_ranks(self.cell)[0].name == "single":
            update |= {"strategy": "single", "strategy_options": {}}
        return self.cell.model_copy(update=update)

    def without_switches(self) -> Cell:
        """The cell without the options that other layouts choose again."""
        rest = {name: v for name, v in self.cell.model_options.items() if name not in self.released}
        return self.cell.model_copy(update={"model_options": rest})

    def training(self, backend: str, searched: Mapping[str, Any]) -> dict[str, Any] | None:
        """The settings of ``training`` of a layout with a backend: ``searched`` ones and the kept ones; None:
        these exclude each other, or the backend lacks the job's update rule, such as Muon."""
        usual = backend_class(backend).options_type()
        there = asdict(usual)
        if self.kept.get("update", "adam") != there.get("update", "adam") and "update" not in there:
            return None
        own = {name: value for name, value in self.kept.items() if there.get(name, value) != value}
        try:
            set_options(usual, {**own, **searched}, backend)
        except ValueError:
            return None
        return {"backend": backend, **own, **searched}

    def remarks(self) -> list[str]:
        """Lines on the options that other layouts choose again, and on the options that they keep."""
        lines = []
        if self.released:
            switches = written(dotted("model_options", self.released))
            lines.append(f"other layouts than yours choose anew: {switches}; --set keeps one")
        if own := {name: self.kept[name] for name in self.cell.training.backend_options if name in self.kept}:
            lines.append(f"kept where a backend has it: {written(dotted('training', own))}")
        return lines


def _kept(training: TrainingOptions) -> dict[str, Any]:
    """The options of a backend, by name, that other layouts keep: all except those that a search chooses."""
    kind = backend_class(training.backend).options_type
    options = asdict(set_options(kind(), training.backend_options, training.backend))
    searched = {name for each in kind.searched() for name in each}
    kept = {name: value for name, value in options.items() if name not in {*searched, *_CHOSEN}}
    if kept.get("accumulate_allreduce_grads_in_fp32"):
        kept["reduce_dtype"] = "fp32"  # what Megatron-LM's buffers are to fully_shard
    return kept
