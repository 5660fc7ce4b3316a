"""`spbench verify` at work and its output: the verdict, where strategies go wrong, verdicts by strategy, and
cases that are not green, grouped by strategy, model and reason."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

from spbench.bench import measure
from spbench.bench.cell import TrainingOptions
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import Progress
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.errors import UserError
from spbench.bench.row import finite
from spbench.bench.setting_values import names_a_file, read_model_file
from spbench.bench.verdicts import VERDICTS_FILE, Verdict, VerifyRow, kept_verdicts, verified_code
from spbench.impls import DEFAULT_BACKEND, PRECISIONS, absent, all_models, all_pairs, all_peers
from spbench.plots.series import grouped

#: the statuses that are no faults
_NO_FAULTS = {"green", "unsupported", "as published"}
#: the text on bytes where no case compares them with a closed form
NOT_COMPARED = "not compared, as closed forms count whole models"
#: the sections of settings, with the option that names the owner of a section's settings
_OWNERS = {"model_options": "--model", "strategy_options": "--strategy", "training": "--backend"}

Pairs = Sequence[tuple[str, str]]


def verified(
    subject: str,
    strategy: Sequence[str],
    model: Sequence[str],
    *,
    pairs: bool,
    peers: bool,
    world_size: Sequence[int],
    dtype: Sequence[str],
    part: Sequence[str],
    backend: str,
    changes: Pairs,
    device: Literal["cpu", "cuda"] | None,
    output: Path | None,
) -> Output:
    """Verify strategies, and return the output of `spbench verify`; the arguments are the command's options,
    and ``subject`` is a step of the user's own, "" for strategies.

    Raises:
        UserError: a name is unknown, or an option or its value is refused.
    """
    of_cases = (strategy, model, pairs, peers, dtype, part, changes, backend != DEFAULT_BACKEND)
    if subject and (any(of_cases) or device == "cuda"):
        raise UserError(f"{subject} is verified in float64 as it is; leave out all options but --world-size")
    if peers:
        strategy = [
            *strategy,
            *(name for name, cls in sorted(all_peers().items()) if not absent(cls.requires)),
        ]
    named = [name for text in strategy for name in measure.cell_names("strategy", text)]
    models = [name for text in model for name in measure.cell_names("model", text)]
    _check_names(named, models, dtype, part, backend)
    options = _options(changes, [models, named, [backend]])
    on = measure.chosen_device(device or ("cpu" if subject else "available"))
    made_by: Verdict = {"backend": backend, "device": on}
    made_by |= {name: measure.provenance()[name] for name in ("commit", "torch")}
    made_by |= {"code": verified_code(), "time": datetime.now(UTC).isoformat(timespec="seconds")}
    cases = partial(
        measure.verify_cases,
        [*named, *(pair.name for pair in all_pairs() if pairs)] or None,
        models or None,
        list(world_size or ((4,) if pairs else (1, 2, 3, 4))),
        list(dtype or ("fp64",)),
        list(part) or None,
        model_options=options["model_options"],
        options=options["strategy_options"],
        backend=backend,
        backend_options=options["training"],
        device=on,
        explain=1,
    )
    verdicts = _kept(partial(measure.verify_step, subject, world_size) if subject else cases, made_by, output)
    judged = _output(verdicts, named, [output / VERDICTS_FILE] if output is not None else [])
    if judged.code == 0 and not (subject or named or world_size or any(of_cases)):
        measure.keep_package_proof()
    return judged


def _kept(rows: Callable[..., Iterator[VerifyRow]], made_by: Verdict, output: Path | None) -> list[Verdict]:
    """The verdicts of rows, which are added to those in the folder ``output`` as soon as they are there."""
    with kept_verdicts(output, made_by) as verdicts, Progress() as progress:
        for row in rows(expect=progress.expect):
            verdicts.append(finite(dataclasses.asdict(row)))
            progress.step(f"{_spelled(row)}: {row.status}", is_fault=row.status == "RED")
            progress.now(f"{progress.done} of {progress.total} cases; {_spelled(row)}: {row.status}")
    return verdicts


def _output(verdicts: Sequence[Verdict], named: Sequence[str], files: list[Path]) -> Output:
    counts = Counter(verdict["status"] for verdict in verdicts)
    judged = {verdict["strategy"] for verdict in verdicts if verdict["status"] != "unsupported"}
    unproven = [name for name in dict.fromkeys(named) if verdicts and name not in judged]
    notes = [f"{name}: all cases are unsupported, so nothing is proven of it" for name in unproven]
    notes += [", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing to verify"]
    refused, green = ([v for v in verdicts if v["status"] == each] for each in ("unsupported", "green"))
    return Output(
        _sections(verdicts),
        verdicts,
        verdicts,
        notes=notes,
        files=files,
        code=0 if judged and not unproven and set(counts) <= _NO_FAULTS else 1,
        details=[*_each(_faults(verdicts)), *_folded("Unsupported", refused), *_each(green)],
    )


def _spelled(row: VerifyRow) -> str:
    """The case of a row as text: strategy, model, variant, part, number of ranks, precision and mesh."""
    case = [row.strategy, row.model, row.variant, row.part, f"N={row.size}", row.dtype]
    case += [row.mesh] if "x" in row.mesh else []
    return " ".join(word for word in case if word)


def _check_names(
    strategies: Sequence[str],
    models: Sequence[str],
    dtypes: Sequence[str],
    parts: Sequence[str],
    backend: str,
) -> None:
    """Refuse an unknown name.

    Raises:
        UserError: a name is unknown; the message suggests the nearest.
    """
    for name in strategies:
        if problem := measure.strategy_problem(name):
            raise UserError(problem)
    measure.check_known("model", [name for name in models if not names_a_file(name)])
    measure.check_known("backend", [backend])
    measure.check_known("dtype", dtypes, list(PRECISIONS))
    measure.check_known(
        "part", parts, sorted({part for model in all_models().values() for part in model.parts()})
    )


def _options(changes: Pairs, owners: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """The values of ``--set``, such as "model_options.window=8", by section and option.

    Args:
        owners: the named models, the named strategies and the backends, which have these options.

    Raises:
        UserError: no owner of an option is named, or an owner lacks the option or refuses its value.
    """
    by_section = dict(zip(_OWNERS, owners, strict=True))
    options: dict[str, dict[str, Any]] = {section: {} for section in by_section}
    for path, value in measure.given(changes).items():
        section, _, name = path.partition(".")
        of_a_step = section == "training" and name in TrainingOptions.model_fields
        if not name or section not in options or of_a_step:
            raise UserError(f"--set {path}: verify takes {', '.join(f'{each}.OPTION' for each in options)}")
        if not by_section[section]:
            raise UserError(f"--set {path} needs what it belongs to by name; add {_OWNERS[section]}")
        options[section][name] = value
    for section, owner in ((each, name) for each in options if options[each] for name in by_section[each]):
        config = read_model_file(owner) if section == "model_options" and names_a_file(owner) else None
        for below, problem in measure.option_mistakes(section, owner, options[section], config):
            raise UserError(f"--set {'.'.join([section, *below])} of {owner}: {problem}")
    return options


def _sections(rows: Sequence[Verdict]) -> list[Table | str]:
    """The output's sections: the number of RED cases and where they go wrong; verdicts by strategy; then the
    cases that are not green, grouped."""
    if not rows:
        return []
    faults = _faults(rows)
    red = [row for row in faults if row["status"] == "RED"]
    wrong = ", ".join(dict.fromkeys(row["strategy"] for row in red))
    verdict = [f"{wrong} wrong: {len(red)} of {len(rows)} cases are RED"] if red else []
    return [*verdict, *_explanations(red), _by_strategy(rows), *_folded("Not green", faults, _FIRST)]


def _faults(rows: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts that are neither green nor unsupported."""
    return [row for row in rows if row["status"] not in ("green", "unsupported")]


def _explanations(wrong: Sequence[Verdict]) -> Iterator[str]:
    """A section for each strategy that is RED: where its step goes wrong first, in the case that was run once
    more, and whether the bytes of its cases equal the closed forms."""
    for strategy in dict.fromkeys(row["strategy"] for row in wrong):
        mine = [row for row in wrong if row["strategy"] == strategy]
        row = next((row for row in mine if row["explanation"]), mine[0])
        names = ("strategy", "model", "variant", "part", "mesh", "dtype")
        case = " ".join(str(row[name]) for name in names if row[name])
        equal = VerifyRow.EQUAL
        unequal = [*dict.fromkeys(each["bytes"] for each in mine if each["bytes"] not in ("", equal))]
        compared = equal if any(each["bytes"] == equal for each in mine) else NOT_COMPARED
        where = row["verdict"].split(": ")[0] if row["verdict"] else row["reason"]
        lines = [where, *row["explanation"].splitlines(), f"bytes sent: {'; '.join(unequal) or compared}"]
        yield "\n".join([f"Where it goes wrong, {case}:", *(f"  {line}" for line in lines)])


def _by_strategy(rows: Sequence[Verdict]) -> Table:
    groups = grouped(rows, lambda row: (row["strategy"], row["dtype"]))
    statuses = dict.fromkeys(["green", *(row["status"] for mine in groups.values() for row in mine)])
    lines = []
    for (strategy, dtype), mine in groups.items():
        counts = Counter(row["status"] for row in mine)
        line = {"strategy": strategy, "dtype": dtype, **{each: counts[each] or None for each in statuses}}
        error = max((row["error"] for row in mine if row["status"] == "green"), default=None)
        limit = min((row["limit"] for row in mine if row["limit"] is not None), default=None)
        compared = [row["bytes"] == VerifyRow.EQUAL for row in mine if row["bytes"]]
        line |= _TABLES.record("by strategy", error=error, limit=limit, compared=compared)
        lines.append(line)
    return Table("Verdicts by strategy", lines)


#: how many reasons a terminal shows without --details
_FIRST = 2
_ALIKE = ("strategy", "model", "part", "dtype", "status")

_TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


def _folded(title: str, rows: Sequence[Verdict], texts: int | None = None) -> list[Table | str]:
    """A table with a row for the cases of one strategy, model, part, precision and reason, with the worst
    error (unsupported cases: a row for each reason); then the first ``texts`` reasons (None: all)."""
    reasons = [*dict.fromkeys(filter(None, map(_why, rows)))]
    alike = grouped(
        rows, lambda row: (_why(row), *(row[n] for n in _ALIKE if row["status"] != "unsupported"))
    )
    lines = []
    for (why, *_), mine in alike.items():
        worst = max(mine, key=lambda row: row["error"] or 0.0)
        names = {name: ", ".join(dict.fromkeys(row[name] for row in mine)) for name in _ALIKE}
        number = f"({reasons.index(why) + 1})" if why else None
        lines.append(
            names | {"cases": len(mine), "why": number, **{n: worst[n] for n in ("error", "tensor")}}
        )
    if not lines:
        return []
    table = _TABLES.table("alike", f"{title}, like cases together", lines)
    return [table, *_numbered(reasons[:texts])]


def _each(rows: Sequence[Verdict]) -> list[Table | str]:
    """The table of single verdicts, then the distinct reasons of verdicts that are not green."""
    if not rows:
        return []
    texts = [*dict.fromkeys(filter(None, map(_why, rows)))]
    numbered = [{**row, "why": f"({texts.index(_why(row)) + 1})" if _why(row) else None} for row in rows]
    title = "Relative errors against the single-device model in fp64: the worst tensor of all ranks"
    return [_TABLES.table("case", title, numbered), *_numbered(texts)]


def _numbered(texts: Sequence[str]) -> list[str]:
    """A section with the texts and their numbers in the table; no section without texts."""
    lines = [f"({number}) {text}" for number, text in enumerate(texts, 1)]
    return ["\n".join(["Why, by the numbers of the table:", *lines])] if lines else []


def _why(row: Verdict) -> str:
    """Why a case is not green: its verdict's text, or the reason why it could not be run; "" if green."""
    return row["verdict"] or row["reason"]
