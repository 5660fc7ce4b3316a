"""`spbench export`: results as the files that dashboards and CI systems read. The modules that write these
files get an :class:`ExportRequest` (suites of results, each with its base), and return :class:`Exported`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import click

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.command_line.progress import message
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import write_together
from spbench.bench.measure import RESULTS_FILE
from spbench.bench.row import Row
from spbench.bench.tools.changes import EXPORTS
from spbench.bench.tools.changes.history import TARGETS_FILE, Target, read_entries
from spbench.bench.tools.changes.judgement import Suite, read_suite
from spbench.bench.tools.changes.metrics import Reading, readings
from spbench.bench.tools.changes.result_files import Origin, read_results, suite_of

#: what records of other programs hold
FORMS = RecordForms(Path(__file__).with_name("exports.yaml"))
#: statuses of cells whose numbers count, as in the gate
WITH_VALUES = ("ok", "oom")


class ExportedValue(NamedTuple):
    """A metric's value in a cell, to be exported, with its suite and row."""

    suite: Suite
    row: Row
    reading: Reading

    @property
    def number(self) -> float:
        """The value, as :func:`integral` writes it."""
        return integral(self.reading.value)

    @property
    def origin(self) -> Origin:
        return self.suite.origin(self.row)

    @property
    def about(self) -> dict[str, Any]:
        """The names that expressions of exports.yaml have for a number of a cell."""
        names = {**self._asdict(), "metric": self.reading.metric, "value": self.number, "origin": self.origin}
        return {**names, "cell": self.row["cell"], "facts": names["origin"].machine}


def integral(value: float) -> float:
    """The value, as an int if it is a whole number, so that JSON has all its digits and no exponent."""
    return int(value) if float(value).is_integer() else value


def numbers_of(suite: Suite, *metrics: str) -> Iterator[ExportedValue]:
    """The numbers of the named metrics (without names, of all metrics), cell by cell in the order of the rows
    and, within a cell, of :data:`METRICS`."""
    for row in suite.rows:
        if row["status"] in WITH_VALUES:
            for name, reading in readings(row).items():
                if reading.is_finite and (not metrics or name in metrics):
                    yield ExportedValue(suite, row, reading)


@dataclass(frozen=True)
class ExportRequest:
    """The results that an export gets.

    Attributes:
        suites: at least one; the names of suites differ.
        output: the file or folder that will be written; None for standard output.
        targets: values that metrics have to meet.
        not_run: names of bases that have no results.
        heeded: contains "targets" once an export has called :meth:`target`.
    """

    suites: Sequence[Suite]
    output: Path | None = None
    targets: Sequence[Target] = ()
    not_run: Sequence[str] = ()
    heeded: set[str] = field(default_factory=set)

    def values(self, *metrics: str) -> list[ExportedValue]:
        """The numbers of the named metrics (without names, of all metrics), by suite and row.

        Raises:
            UserError: no cell has such a number; the message counts the cells by status.
        """
        values = [value for suite in self.suites for value in numbers_of(suite, *metrics)]
        if not values:
            raise UserError(f"nothing to export: {'; '.join(self.left_out(*metrics))}")
        return values

    def target(self, value: ExportedValue) -> float | None:
        """The value that the number has to meet, by the first target that names its metric; None without."""
        self.heeded.add("targets")
        machine = "" if value.reading.exact else value.origin.host
        place = (value.suite.name, value.row["key"], value.reading.metric.name, machine)
        return next((target.value for target in self.targets if target.names(*place)), None)

    def left_out(self, *metrics: str) -> list[str]:
        """A line for each suite with cells that have none of the named metrics (without names: no metric)."""
        what = " or ".join(metrics) or "value"
        lines = []
        for suite in self.suites:
            with_value = {value.row["key"] for value in numbers_of(suite, *metrics)}
            left = Counter(row["status"] for row in suite.rows if row["key"] not in with_value)
            if left:
                counts = ", ".join(f"{count} {status}" for status, count in left.items())
                lines.append(f"{suite.name}: left out {left.total()} cells without a {what}: {counts}")
        return lines


@dataclass(frozen=True)
class Exported:
    """The text of an export's files.

    Attributes:
        content: the text of the one file; or the texts of several, by path within the output's folder, in the
            order in which the files are put in place.
        notes: lines that say which cells were left out and why.
    """

    content: str | Mapping[str, str]
    notes: Sequence[str] = ()


# -- suites from files -----------------------------------------------------------------------------------


def read_suites(
    paths: Sequence[Path], base: Path | None, previous_base: Path | None, commit: str = ""
) -> list[Suite]:
    """The results at these paths (see :func:`read_results`), each with its bases.

    Args:
        base: the base of the results; or a folder with a base for each, under the names of the results.
        previous_base: the base before the change, in the same form; results without a base there are new.
        commit: the commit of all rows, whatever the rows say; "": each row says its own.

    Raises:
        UserError: a file cannot be read, results have no base, two results have one name, or the gate
            does not judge the results (:func:`check_gate`).
    """
    suites: dict[str, Suite] = {}
    alone = len(paths) == 1
    for name, path in ((suite_of(path), path) for path in paths):
        if name in suites:
            raise UserError(f"{suites[name].path} and {path} are both called {name!r}; rename one of them")
        suite = read_suite(path, base and _base_of(name, base, alone=alone), commit)
        if previous_base and (alone or _is_results(previous_base / name)):
            place = _base_of(name, previous_base, alone=True)
            if _is_results(place) or not place.is_dir():
                suite = replace(suite, previous_base=read_results(place))
        suites[name] = suite
    return [*suites.values()]


def not_run(paths: Sequence[Path], base: Path | None) -> list[str]:
    """The names of the bases in a folder that have no results at ``paths``."""
    if base is None or _is_results(base):
        return []
    names = {path.parent.name for path in base.glob(f"*/{RESULTS_FILE}")}
    return sorted(names - {suite_of(path) for path in paths})


def _base_of(name: str, base: Path, *, alone: bool) -> Path:
    """The path of the base of the results called ``name``: ``base``, or the folder of that name in it."""
    return base / name if _is_results(base / name) or not alone else base


def _is_results(path: Path) -> bool:
    return (path / RESULTS_FILE).is_file()


def _check_export(ctx: click.Context, param: click.Parameter, name: str) -> str:
    if name not in EXPORTS:
        raise click.BadParameter(f"no export {name!r}{suggestion(name, EXPORTS.names())}", ctx, param)
    return name


@click.command("export")
@click.option(
    "--to",
    "system",
    required=True,
    metavar=f"[{'|'.join(EXPORTS.names())}]",
    callback=_check_export,
    help="The system that reads the files.",
)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@path_option(
    "--base",
    "What markdown, junit and github-annotations compare with: results, or a folder that has results under "
    "the name of each of RESULTS, such as results/baseline.",
)
@path_option(
    "--previous-base",
    "The base before the change, such as the baseline of the target branch. Markdown says that what "
    "differs between the two bases was meant.",
)
@path_option("--targets", "A history whose targets.yaml has values to be met, for hud.", metavar="HISTORY")
@click.option("--commit", default="", help="The commit of the results; by default what their rows say.")
@path_option("--output", "File, or folder for several files; by default standard output.")
@printed
def command(
    system: str,
    results: tuple[Path, ...],
    base: Path | None,
    previous_base: Path | None,
    targets: Path | None,
    commit: str,
    output: Path | None,
) -> Output:
    """Write RESULTS for another system.

    RESULTS are what spbench compare takes. Cells without a value are left out and counted, never written as
    0. The exit code is 0 if everything is written, even if results are worse than their base. The gate is
    spbench compare.
    """

    suites = read_suites(results, base, previous_base, commit)
    goals = read_entries(targets / TARGETS_FILE, Target) if targets else ()
    request = ExportRequest(suites, output, goals, not_run(results, base))
    exported = EXPORTS.load(system)(request)
    if targets is not None and "targets" not in request.heeded:
        raise UserError(f"--targets: {system} has no values to be met; leave it out")
    if output is not None:
        named = {"": exported.content} if isinstance(exported.content, str) else exported.content
        files = write_together({output / name: text for name, text in named.items()})
        names = [str(path) for path in files]
        content = {"files": names, "notes": list(exported.notes)}
        return Output((), content, [{"file": name} for name in names], notes=exported.notes, files=files)
    if isinstance(exported.content, Mapping):
        raise UserError(
            f"{system} is several files ({', '.join(exported.content)}); name a folder by --output"
        )
    for note in exported.notes:
        message(f"spbench: {note}")
    text = exported.content
    content = {"text": text, "notes": list(exported.notes)}
    return Output([Verbatim(text.removesuffix("\n"))], content, [{"text": text}])
