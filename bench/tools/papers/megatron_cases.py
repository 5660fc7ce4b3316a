"""`spbench reproduce megatron_cases`: predictions of the last rank's memory and the step time of every case
of Megatron-LM's functional tests, imported like by `spbench import`, and their errors from golden values.

A case is imported only from its arguments and its environment, once for each of its golden values: with the
machine that the value's name says, and the container in which Megatron-LM's tests ran at the commit that
recorded the value. Only the cases in ``roles`` of megatron_cases.yaml had settings chosen by looking at
golden values. Some golden values belong to other arguments than the case's; see :func:`departures`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

from pandas import DataFrame

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.scenario_run import RanScenario
from spbench.bench.errors import UserError
from spbench.bench.measure import Scenario
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.megatron import read
from spbench.bench.tools.jobs.megatron_model import CONTAINER
from spbench.bench.tools.papers.answer import document_model
from spbench.bench.tools.papers.comparison import write_csv
from spbench.bench.tools.papers.paper_findings import TABLES
from spbench.bench.tools.papers.sources import published_file
from spbench.bench.yaml_files import read_yaml

#: arguments of `spbench reproduce`, and names of files of predictions: GPT and BERT; experts and hybrids
CASES, EXPERT_CASES = "megatron_cases", "megatron_moe_cases"
GOLDEN_FILES = ("megatron_lm_goldens.csv", "megatron_lm_goldens_more.csv", "megatron_moe_goldens.csv")
#: quantities of memory that golden values have
MEMORY = ("peak_first", "peak_last", "allocated_last")
GPUS = ("a100", "h100", "gb200")
#: how the name of a golden value ends if its run resumed from a checkpoint
RESUMED = "_2nd"
#: when each golden value was recorded, and in which container
_RECORDED_FILE = "megatron_cases_recorded.csv"
#: columns of megatron_cases.csv; golden, gpu: with _2nd for the run that goes on from a checkpoint;
#: container: of PyTorch; bytes of the last rank at the first and at a later step, seconds
PREDICTIONS = ("case", "golden", "gpu", "container", *MEMORY, "step_time_s", "refusal")
#: columns of megatron_cases_errors.csv; error: predicted / measured - 1; departs: why a golden value may not
#: be that of the case's arguments, or "" (:func:`departures`)
ERRORS = ("case", "golden", "quantity", "measured", "predicted", "error", "role", "departs")
#: roles, GPUs and vocabularies of cases
_FACTS = read_yaml(Path(__file__).with_suffix(".yaml"))
#: how many GPUs a case runs on: one node, and one node of GB200
_NODE, _SMALL_NODE = 8, 4


@dataclass(frozen=True)
class GoldenCase:
    """A functional test, with the machine and container of one of its golden values.

    Attributes:
        golden: the name of the golden value: dev or lts, and the machine.
        container: the release of NVIDIA's container, as "25.09"; text: the test's configuration.
    """

    family: str
    case: str
    golden: str
    container: str
    text: str

    @cached_property
    def job(self) -> Job:
        """The job that results from importing the case's arguments."""
        path = Path(self.family, self.case, "model_config.yaml")
        gpu, _ = machine_of(self.golden)
        small = gpu == "gb200" and self.case.endswith("_1node")
        gpus = _by_name("gpus", self.case, _SMALL_NODE if small else _NODE)
        job = read(JobFiles([JobFile(path, self.text.encode())], gpus, f"{gpu}-megatron-tests"))
        assert job is not None
        return replace(job, strict=True)

    @cached_property
    def cell(self) -> Cell | str:
        """The cell of the case, or the reason why it has none."""
        try:
            # rows that were computed before cells named their program have none: no interval is asked for
            cell = self.job.cell().model_copy(update={"program": ""})
        except UserError as error:
            return str(error).partition(": ")[2]
        if not machine_of(self.golden)[1]:
            return cell
        # a checkpoint has Adam's moments, and the machine of the first run has the times of its kernels
        training = cell.training.model_copy(update={"moments": "kept"})
        options = {
            name: value for name, value in cell.model_options.items() if not name.startswith("autotune")
        }
        return cell.model_copy(update={"training": training, "model_options": options})


def _by_name(what: str, case: str, otherwise: Any) -> Any:
    """The fact of kind ``what`` whose key starts the case's name; ``otherwise`` if there is none."""
    return next((value for start, value in _FACTS[what].items() if case.startswith(start)), otherwise)


def cases(*names: str) -> list[GoldenCase]:
    """The cases of :data:`CASES`, :data:`EXPERT_CASES` or, by default, both, each for every golden value that
    it has."""
    recorded = published_file(_RECORDED_FILE).rows
    of_golden = {(row["case"], row["golden"]): row for row in recorded}
    rows = [row for name in names or (CASES, EXPERT_CASES) for row in published_file(f"{name}.csv").rows]
    listed = []
    for row in rows:
        for golden in row["goldens"].split():
            then = of_golden[row["case"], golden]
            changed = json.loads(then["args"] or "{}")
            arguments = {**json.loads(row["args"]), **changed}
            of_file = _FACTS["vocabulary_files"].get(arguments.get("vocab-file", ""))
            if words := of_file or _by_name("vocabularies", row["case"], None):
                arguments["vocab-size"] = words
            variables = {CONTAINER: then["container"], **json.loads(row["env"])}
            content = {"ENV_VARS": variables, "MODEL_ARGS": arguments}
            text = json.dumps(content)  # JSON is YAML
            listed.append(GoldenCase(row["family"], row["case"], golden, then["container"], text))
    return listed


def predicted_cases(run: Callable[[Scenario], RanScenario], output: Path, name: str = CASES) -> Output:
    """Run the cells of all cases of the file ``name``, each once, and write NAME.csv and NAME_errors.csv.

    Args:
        run: runs the cells of a scenario.
        output: the folder of the files.
    """
    all_cases = cases(name)
    ran = run(scenario_of(all_cases))
    lines = list(predictions(all_cases, ran.known))
    varying = {c.case: varies_by(c.cell) for c in all_cases if isinstance(c.cell, Cell)}
    compared = list(errors(lines, varying))
    files = [
        write_csv(DataFrame(rows, columns=list(columns), dtype=object), output / f"{file}.csv")
        for file, rows, columns in ((name, lines, PREDICTIONS), (f"{name}_errors", compared, ERRORS))
    ]
    imported = {line["case"] for line in lines if not line.get("refusal")}
    text = f"{len(imported)} of {len({case.case for case in all_cases})} cases are imported and predicted"
    sizes = list(summary([each for each in compared if not each["departs"]]))
    left_out = len(compared) - sum(not each["departs"] for each in compared)
    text += f"; {left_out} golden values may belong to other arguments" if left_out else ""
    table = Table("Errors of predicted memory, from golden values", sizes)
    kinds = list(by_departure(compared))
    tables = [table, *([Table("Errors by why a golden value departs", kinds)] if left_out else [])]
    content = {"predictions": lines, "errors": compared, "summary": sizes, "departures": kinds}
    return Output([text, *tables], content, lines, PREDICTIONS, files=files, code=int(ran.failed()))


def scenario_of(all_cases: Sequence[GoldenCase]) -> Scenario:
    """The cells of all cases that have one, each once."""
    cells = {case.cell.key: case.cell for case in all_cases if isinstance(case.cell, Cell)}
    document = document_model()(title="Megatron-LM's functional tests, as they are imported", groups=[{}])
    return Scenario(CASES, Path(f"{CASES}.yaml"), document, {"": list(cells.values())})


def predictions(
    all_cases: Sequence[GoldenCase], rows: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """A line of :data:`PREDICTIONS` for each case whose cell is among the rows, by its key, or has none."""
    for case in all_cases:
        gpu, resumed = machine_of(case.golden)
        line: dict[str, Any] = {
            "case": case.case,
            "golden": case.golden,
            "gpu": f"{gpu}{RESUMED * resumed}",
            "container": case.container,
        }
        if isinstance(case.cell, str):
            yield line | {"refusal": case.cell}
        elif (row := rows.get(case.cell.key)) is not None:
            yield line | _predicted(row)


def _predicted(row: Mapping[str, Any]) -> dict[str, Any]:
    measured = row["measurement"]
    classes = [entry for entry in measured.get("by_class", ()) if entry["step"] > 0]
    if not classes:
        return {"refusal": row["reason"] or row["status"]}
    stage = max(entry["stage"] for entry in classes)
    last = [entry for entry in classes if entry["stage"] == stage]
    first, later = min(last, key=lambda e: e["step"]), max(last, key=lambda e: e["step"])
    return {
        "peak_first": first["peak_memory_bytes"],
        # the allocator's peak is from the start of the process on
        "peak_last": max(entry["peak_memory_bytes"] for entry in last),
        "allocated_last": later["allocated_bytes"],
        "step_time_s": measured["step_time_s"],
    }


def errors(
    lines: Sequence[Mapping[str, Any]], varying: Mapping[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """A line of :data:`ERRORS` for each golden value of memory with a prediction; ``varying``: results of
    :func:`varies_by` by case."""
    by_golden = {(line["case"], line["golden"]): line for line in lines}
    departs = departures(varying or {})
    for file in GOLDEN_FILES:
        for row in published_file(file).rows:
            line = by_golden.get((row["case"], row["golden"]))
            for quantity in MEMORY:
                ours = line and line.get(quantity)
                if ours and row[quantity]:
                    yield TABLES.record(
                        "golden",
                        row,
                        quantity=quantity,
                        measured=float(row[quantity]),
                        predicted=ours,
                        role=_by_name("roles", row["case"], "predicted"),
                        departs=departs.get((row["case"], row["golden"]), ""),
                    )


def summary(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines on the absolute errors of each quantity: on all machines, and by kind of machine."""
    errors = DataFrame(lines, columns=list(ERRORS))
    errors["size"] = errors["error"].abs()
    errors["gpu"] = [machine_of(golden)[0] for golden in errors["golden"]]
    for quantity, gpu in product(MEMORY, ("all", *GPUS)):
        some = errors[(errors["quantity"] == quantity) & ((errors["gpu"] == gpu) | (gpu == "all"))]
        if len(some):
            yield TABLES.record("errors by machine", some["size"], quantity=quantity, machines=gpu)


def by_departure(lines: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Lines on the absolute errors of each quantity, by the first word of ``departs``."""
    errors = DataFrame(lines, columns=list(ERRORS))
    errors["kind"] = [reason.partition(" ")[0] or "none" for reason in errors["departs"]]
    for (kind, quantity), some in errors.groupby(["kind", "quantity"]):
        yield TABLES.record("errors by departure", some["error"].abs(), departs=kind, quantity=quantity)


def of_all_machines(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of :func:`summary` on all machines together, without the column of machines."""
    return [
        {name: value for name, value in line.items() if name != "machines"}
        for line in lines
        if line["machines"] == "all"
    ]


# -- golden values that may not be of a case's arguments ----------------------------------------------------


def machine_of(golden: str) -> tuple[str, bool]:
    """(kind of machine in the name of a golden value, or a100; whether the run resumed from a checkpoint)."""
    return next((gpu for gpu in GPUS if gpu in golden), "a100"), golden.endswith(RESUMED)


def varies_by(cell: Cell) -> str:
    """Why the cell does not fix the number of rows of a rank's experts: "routing", the learned router
    decides, or "sinkhorn", which shares each rank's own tokens out evenly except for ties. "": no experts are
    spread over ranks, a capacity is filled up, or tokens are forced to be even."""
    options = dict(cell.model_options)
    spread = cell.sizes.by_axis.get("ep", 1) > 1
    filled = options.get("capacity") is not None and bool(options.get("capacity_padded"))
    if not options.get("experts") or not spread or filled or "routing" in options:
        return ""
    return "sinkhorn" if options.get("router") == "sinkhorn" else "routing"


def departures(varying: Mapping[str, str]) -> dict[tuple[str, str], str]:
    """For each (case, golden value) that may not be of the case's arguments in this release, the reason that
    the values show. "as CASE GOLDEN": all values of lts are those of another case or of dev. "machine": an
    A100's step takes as long as an H100's and leaves as much allocated. "release": the first peak of lts is
    over 5% from each of dev. "checkpoint": a run that went on from one has its largest peak before its first
    step ends. Else the value of ``varying`` for the case."""
    reasons: dict[tuple[str, str], str] = {}
    before: dict[tuple[str, ...], tuple[str, str]] = {}
    rows = [row for file in GOLDEN_FILES for row in published_file(file).rows]
    of_h100 = {row["case"]: row for row in rows if row["golden"] == "dev_dgx_h100"}
    of_dev: dict[str, list[float]] = {}
    for row in rows:
        if row["golden"].startswith("dev") and row["peak_first"] and not machine_of(row["golden"])[1]:
            of_dev.setdefault(row["case"], []).append(float(row["peak_first"]))
    for row in rows:
        place, first = (row["case"], row["golden"]), row["peak_first"]
        values = tuple(row[quantity] for quantity in MEMORY)
        other = before.setdefault(values, place) if all(values) else place
        another = other[0] != place[0] or other[1][:3] != place[1][:3]
        off = [abs(float(first) / each - 1) for each in of_dev.get(place[0], ()) if first]
        if place[1].startswith("lts") and another:
            reasons[place] = f"as {' '.join(other)}"
        elif machine_of(place[1])[0] == "a100" and _alike(row, of_h100.get(place[0])):
            reasons[place] = "machine"
        elif place[1].startswith("lts") and off and min(off) > 0.05:
            reasons[place] = "release"
        elif place[1].endswith(RESUMED) and first == row["peak_last"]:
            reasons[place] = "checkpoint"
        elif kind := varying.get(place[0]):
            reasons[place] = kind
    return reasons


def _alike(row: Mapping[str, str], other: Mapping[str, str] | None) -> bool:
    """Whether two golden values have the same step time within 2%, and the same final memory within 1 MiB. An
    A100's and an H100's do not: their workspaces differ by more, and their steps by a third."""
    if other is None or not all(each["iter_s"] and each["allocated_last"] for each in (row, other)):
        return False
    last, time = (abs(float(row[name]) - float(other[name])) for name in ("allocated_last", "iter_s"))
    return last < 2**20 and time < 0.02 * float(other["iter_s"])
