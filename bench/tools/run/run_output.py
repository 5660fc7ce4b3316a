"""The output of `spbench run`: measurements, comparisons with published numbers, a verdict; or a dry run."""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

from spbench.bench import measure
from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import message
from spbench.bench.command_line.record_forms import TIE, TIE_LEGEND, RecordForms, flat_rows, memory_table
from spbench.bench.command_line.scenario_run import run_cells
from spbench.bench.errors import listed
from spbench.bench.row import FAULTS, Row, finite
from spbench.bench.tools.papers.comparison import Comparison, draw_figure, frame_of
from spbench.bench.tools.papers.paper_findings import comparison_table, errors_by_role
from spbench.bench.tools.papers.sources import unknown_paper
from spbench.bench.units import mib
from spbench.plots.series import differing, grouped

#: a row on one level (:func:`flat`), with its ``tie``, ``options`` and ``communication``
Entry = Mapping[str, Any]

#: columns that are shown once, in the title, where all rows have the same value
_SHARED = ("batch", "seq_len", "precision", "cluster", "engine", "variant")
_TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))
#: the most cells of a status that a note names
_NAMED = 3
_SEARCHED = "a search ends where the card is full, so a real card may hold less"
#: a number of a reason, and no number in a name, such as zero3
_NUMBER = re.compile(r"(?<![\w.-])\d+(?:\.\d+)?")


def run(
    scenario: str,
    narrowing: measure.Narrowing,
    engine: tuple[str, ...],
    device: Literal["cpu", "cuda"] | None,
    rank: int | None,
    jobs: int | None,
    executor: str | None,
    output: Path | None,
    fresh: bool,
    timeout: float | None,
    plain_trace: bool,
    memory: bool,
    must_fit: bool,
    unverified: bool,
    dry_run: bool,
) -> Output:
    """Run a scenario, and return the output of `spbench run`; the arguments are the command's options."""
    loaded = measure.load_scenario(scenario)
    if loaded.has_answers:
        # imported only if the scenario has published numbers
        from spbench.bench.tools.papers.answer import set_beside, with_answers

        loaded = with_answers(loaded)
    if remark := loaded.document.paper and unknown_paper(loaded.document.paper):
        message(f"spbench: warning: {loaded.path}: {remark}")
    narrowing = dataclasses.replace(narrowing, engines=engine, device=device or "available", rank=rank)
    folder = output or Path("results", "runs", loaded.name)
    fresh = fresh or plain_trace
    if dry_run:
        return planned(loaded, narrowing, folder, fresh)
    with (
        measure.only_plain_traces() if plain_trace else nullcontext(),
        measure.executor_at(executor) as there,
    ):
        ran = run_cells(loaded, narrowing, folder, jobs, fresh, None, there, timeout, unverified)
    comparisons, compared = set_beside(loaded, ran) if loaded.has_answers else ([], [])
    drawn, figure_failed = draw_figure(loaded, ran, comparisons, folder)
    outcome = results(loaded, ran.rows, comparisons, [ran.path, *compared, *drawn], memory)
    return dataclasses.replace(outcome, code=1 if ran.failed(must_fit) or figure_failed else 0)


def planned(scenario: measure.Scenario, narrowing: measure.Narrowing, folder: Path, fresh: bool) -> Output:
    """A table that says of each cell whether it would run, is unsupported, or has a row from before."""
    cells = narrowing.cells(scenario)
    rows, problems = ([], []) if fresh else measure.read_rows(folder)
    for problem in problems:
        message(f"spbench: warning: {problem}")
    kept = {row.key: row for row in rows}
    digest_of = measure.digests_of_a_run()
    if stale := measure.outdated(cells, kept, digest_of):
        message(f"{scenario.name}: {stale}")

    refused: dict[int, str] = {}

    def now(index: int, cell: Cell) -> str:
        if measure.is_final(cell, kept.get(cell.key), digest_of):
            return f"kept ({kept[cell.key].status})"
        if reason := measure.refusal(cell):
            refused[index] = reason
        return f"unsupported: {reason}" if reason else "would run"

    lines = [_TABLES.record("planned", cell, now=now(index, cell)) for index, cell in enumerate(cells)]
    title = f"{scenario.name}: {scenario.document.title} ({len(cells)} cells)"
    table = Table(title, lines, _TABLES.forms["important"]["planned"], ("now",), _unsupported(cells, refused))
    return Output([table], lines, lines)


def results(
    scenario: measure.Scenario,
    rows: Sequence[Row],
    comparisons: Sequence[Comparison],
    files: list[Path],
    memory: bool,
) -> Output:
    """The output of a scenario: a table of its rows, comparisons with published numbers, and a verdict; with
    ``memory`` also a table of the memory of each class of ranks."""
    ties = measure.tied(rows)
    sections: list[Table | str] = [result_table(scenario.document.title, rows)]
    if any(ties):
        sections.append(TIE_LEGEND)
    if priced_by := measure.priced_by_in_words(row.measurement for row in rows):
        sections.append(f"priced by something else, with shares of the step: {priced_by}")
    if memory:
        sections.append(memory_table({row.key: row.measurement for row in rows}))
    if comparisons:
        sections.append(comparison_table(comparisons))
    content: dict[str, Any] = {
        "scenario": scenario.name,
        "rows": [
            {**measure.with_band(row), "tie": tie, "fits": word, "tight_because": reason}
            for row, tie, (word, reason) in zip(rows, ties, map(_fits, rows), strict=True)
        ],
        "comparison": [dataclasses.asdict(entry) for entry in comparisons],
        "files": [str(path) for path in files],
    }
    return Output(
        sections, finite(content), flat_rows(rows), notes=[*verdict(rows, comparisons)], files=files
    )


def _share(step_s: float | None, *parts: float | None) -> float | None:
    """The share of a step that parts of it take together; None below 0.5%."""
    of_step = sum(part or 0 for part in parts) / step_s if step_s else 0.0
    return of_step if of_step >= 0.005 else None


def _sent_by_axis(communication: Sequence[Mapping[str, Any]] | None) -> str:
    """A text of the MiB that a GPU sends along each axis or group of axes: "tp 5760.00, dp_sp 1.20"."""
    sent: Counter[str] = Counter()
    for each in communication or ():
        sent[each["axis"]] += each["sent_bytes"]
    return ", ".join(f"{axis} {mib(nbytes)}" for axis, nbytes in sent.items() if nbytes)


def result_table(title: str, rows: Sequence[Row]) -> Table:
    """A table with a line for each row; settings that all rows share are in the title. If cells of one number
    of GPUs have several meshes, the mesh and the MiB sent by axis are columns; losses and errors are columns
    too. A terminal counts unsupported rows by their reasons."""
    cells = [Cell.model_validate(row.cell) for row in rows]
    options = _options(cells)
    unsupported = {at: row.reason for at, row in enumerate(rows) if row.status == "unsupported"}
    entries: list[Entry] = [
        {**entry, **_engine(row, entry), "options": option, "communication": row.measurement.communication}
        for row, entry, option in zip(rows, flat_rows(rows), options, strict=True)
    ]
    shared = {name: entries[0][name] for name in _SHARED if len({entry[name] for entry in entries}) == 1}
    by_gpus, by_mesh = ({(e["model"], e["strategy"], e[n]) for e in entries} for n in ("world_size", "mesh"))
    names = dict.fromkeys(name for entry in entries for name in entry if name != "last_step")
    heads = {n: (f"error {n.removeprefix('error_')}", "{:.1e}") for n in names if n.startswith("error_")}
    heads |= {n: (f"last {n.removeprefix('last_')} loss", "{:.6f}") for n in names if n.startswith("last_")}
    unshown = dict.fromkeys([*shared, *([] if len(by_mesh) > len(by_gpus) else ["mesh", "communication"])])
    lines = [
        {
            **_TABLES.record("row", {**entry, **unshown}, share=_share, by_axis=_sent_by_axis, mark=TIE),
            **{
                head: None if (value := entry.get(name)) is None else text.format(value)
                for name, (head, text) in heads.items()
            },
            **_TABLES.record("end", entry),
        }
        for entry in entries
    ]
    common = ", ".join(f"{name} {value}" for name, value in shared.items() if value not in (None, ""))
    important, folded = _TABLES.forms["important"]["row"], _unsupported(cells, unsupported)
    return Table(f"{title} ({common})", lines, important, ("options", "reason"), folded)


def _engine(row: Row, entry: Entry) -> dict[str, Any]:
    """The column ``engine`` of a row whose time a CPU took, which is not the row's cluster; else {}."""
    measured_here = entry.get("step_time_s") and not entry["rates"] and row.cell.get("device") != "cuda"
    return {"engine": f"{entry['engine']} on a CPU"} if measured_here else {}


def _unsupported(cells: Sequence[Cell], reasons: Mapping[int, str]) -> dict[int, str]:
    """For each unsupported cell's index, the text that a terminal shows instead of the row: the reason, and
    the strategies that share the reason."""
    texts: dict[int, str] = {}
    for reason, of in grouped(reasons, reasons.__getitem__).items():
        named = {cells[at].strategy: None for at in of if not reason.startswith(f"{cells[at].strategy} ")}
        texts |= dict.fromkeys(of, f"unsupported: {reason}" + (f" ({', '.join(named)})" if named else ""))
    return texts


def _options(cells: Sequence[Cell]) -> list[str]:
    """A text for each cell of its options and training settings, if the table would otherwise show two cells
    alike: only settings that differ between cells; "" for every cell if none are alike."""
    shown = [(c.model, c.strategy, c.mesh_text, *(getattr(c, name) for name in _SHARED)) for c in cells]
    if len(set(shown)) == len(cells):
        return [""] * len(cells)
    training = [cell.training.model_dump(exclude_defaults=True) for cell in cells]
    settings = [{**c.model_options, **c.strategy_options, **t} for c, t in zip(cells, training, strict=True)]
    names = differing(settings)
    return [" ".join(f"{n}={has[n]}" for n in names if has.get(n) is not None) for has in settings]


def verdict(rows: Sequence[Row], comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Notes: our errors against published numbers, the cells that failed or do not fit, and last the number
    of cells by status."""
    # sent_bytes are compared with our own closed forms, which nobody published
    if published := [entry for entry in comparisons if entry.quantity != "sent_bytes"]:
        yield f"published numbers: {errors_by_role(frame_of(published))}"
    for status in (*FAULTS, "oom"):
        # model, strategy and mesh
        if named := dict.fromkeys(" ".join(row.key.split("/")[:3]) for row in rows if row.status == status):
            yield f"{status}: {listed([*named], _NAMED, '; ')}"
    yield from _tight(rows)
    counts = [f"{count} {status}" for status, count in Counter(row.status for row in rows).most_common()]
    yield f"{len(rows)} cell{'' if len(rows) == 1 else 's'}: {', '.join(counts)}"


def _fits(row: Row) -> tuple[str | None, str | None]:
    """Whether the cell of a row fits, is tight or does not fit, and why it is tight; None if not known."""
    return measure.certainty(Cell.model_validate(row.cell), row.measurement) or (None, None)


def _tight(rows: Sequence[Row]) -> Iterator[str]:
    """A note for each kind of reason why cells that fit may not fit on a real card, with the first such cells
    and with the range of each number in which the cells' reasons differ. A search is tight by nature."""
    tight = [
        (_SEARCHED if row.cell.get("search") else reason, "/".join(row.key.split("/")[:5]))
        for row, (word, reason) in zip(rows, map(_fits, rows), strict=True)
        if word == "tight" and reason
    ]
    for kind, of in grouped(tight, lambda each: _NUMBER.sub("{}", each[0])).items():
        numbers = zip(*(_NUMBER.findall(reason) for reason, _ in of), strict=True)
        spans = (" to ".join(dict.fromkeys((min(each, key=float), max(each, key=float)))) for each in numbers)
        yield f"tight: {listed([cell for _, cell in of], _NAMED, '; ')}: {kind.format(*spans)}"
