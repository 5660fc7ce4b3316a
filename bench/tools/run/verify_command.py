"""`spbench verify`: strategies against the single-device model."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal

import click

from spbench.bench.command_line.options import (
    SETTINGS,
    WORDS,
    device,
    many,
    numbers,
    path_option,
    printed,
)
from spbench.bench.command_line.output import Column, Output, Table
from spbench.bench.command_line.progress import Progress
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.choices import (
    cell_names,
    check_known,
    names,
    option_mistakes,
    strategy_problem,
)
from spbench.bench.measure.scenarios.setting_changes import option_values
from spbench.bench.measure.verify.verdicts import (
    EQUAL,
    VERDICTS_FILE,
    Verdict,
    VerifyRow,
    kept_verdicts,
    verified_code,
)


@click.command("verify")
@many("--strategy", WORDS, "Verify these strategies; all if left out.")
@many("--model", WORDS, "On these models (a config.json: shrunk); the tiny ones if left out.")
@click.option("--pairs", is_flag=True, help="Every two strategies of which one can be around the other.")
@click.option("--peers", is_flag=True, help="Every peer that is installed, and no other if none is named.")
@many("--strategy-option", SETTINGS, "With these options of the strategies, such as placement=zigzag.")
@many("--world-size", numbers(), "On these numbers of ranks; 1, 2, 3 and 4 if left out, 4 for pairs.")
@many("--dtype", WORDS, "In these precisions (fp64, fp32, bf16, fp16); fp64 if left out.")
@many("--part", WORDS, "These parts of the models; all if left out.")
@click.option(
    "--backend", default="legacy_ddp", show_default=True, help="Gradients held and summed by this one."
)
@many("--backend-option", SETTINGS, "With these options of the backend, such as optimizer=host.")
@device
@path_option(
    "--output", "Keep the verdicts in this folder, beside those of other cases; nowhere if left out."
)
@printed
def command(
    strategy: tuple[str, ...],
    model: tuple[str, ...],
    pairs: bool,
    peers: bool,
    strategy_option: tuple[tuple[str, str], ...],
    world_size: tuple[int, ...],
    dtype: tuple[str, ...],
    part: tuple[str, ...],
    backend: str,
    backend_option: tuple[tuple[str, str], ...],
    device: Literal["cpu", "cuda"] | None,
    output: Path | None,
) -> Output:
    """Check outputs and every gradient against a single device.

    Strategies run on real ranks. A strategy is a name, or names with plus signs, one around the next:
    tensor_parallel+ring_attention.
    """
    strategy += _installed_peers() if peers else ()
    strategy = tuple(name for text in strategy for name in cell_names("strategy", text))
    model = tuple(name for text in model for name in cell_names("model", text))
    _check_names(strategy, model, dtype, part, backend)
    if strategy_option and not strategy:
        raise UserError("--strategy-option is of strategies that are named; add --strategy")
    options = _options("strategy_options", strategy, strategy_option, "--strategy-option")
    backend_options = _options("training", [backend], backend_option, "--backend-option")
    from spbench.bench.measure.scenarios.placement import chosen_device
    from spbench.bench.measure.sweep.results import finite
    from spbench.bench.measure.verify import cases
    from spbench.impls.strategies.nesting import pairs as all_pairs

    strategies = [*strategy, *(pair.name for pair in all_pairs())] if pairs else [*strategy]
    ranks_on = chosen_device(device or "available")
    run = {"backend": backend, "device": ranks_on, **_made_now()}
    with kept_verdicts(output, run) as lines, Progress() as progress:
        for row in cases.verify(
            strategies or None,
            list(model) or None,
            list(world_size or ((4,) if pairs else (1, 2, 3, 4))),
            list(dtype or ("fp64",)),
            list(part) or None,
            options=options,
            backend=backend,
            backend_options=backend_options,
            device=ranks_on,
            expect=progress.expect,
            explain=1,
        ):
            lines.append(finite(dataclasses.asdict(row)))
            progress.step(f"{_spelled(row)}: {row.status}", is_fault=row.status == "RED")
            progress.now(f"{progress.done} of {progress.total} cases; {_spelled(row)}: {row.status}")
    counts = Counter(line["status"] for line in lines)
    judged = {line["strategy"] for line in lines if line["status"] != "unsupported"}
    unproven = [name for name in dict.fromkeys(strategy) if lines and name not in judged]
    notes = [f"{name}: all cases are unsupported, so nothing is proven of it" for name in unproven]
    return Output(
        _sections(lines),
        lines,
        lines,
        notes=[
            *notes,
            ", ".join(f"{count} {status}" for status, count in counts.items()) or "nothing to verify",
        ],
        files=[output / VERDICTS_FILE] if output is not None else [],
        code=0 if judged and not unproven and set(counts) <= _NO_FAULTS else 1,
        details=_each([line for line in lines if line["status"] in ("green", "unsupported")]),
    )


def _installed_peers() -> tuple[str, ...]:
    from spbench.impls.registries import absent, peers

    return tuple(name for name, cls in sorted(peers().items()) if not absent(cls.requires))


def _spelled(row: VerifyRow) -> str:
    """The case of a row, in words."""
    case = [row.strategy, row.model, row.variant, row.part, f"N={row.size}", row.dtype]
    case += [row.mesh] if "x" in row.mesh else []
    return " ".join(word for word in case if word)


def _made_now() -> dict[str, Any]:
    """What made a verdict: the commit, a digest of its code, torch's version and the time."""
    from spbench.bench.measure.sweep.provenance import provenance

    origin = {name: provenance()[name] for name in ("commit", "torch")}
    return origin | {"code": verified_code(), "time": datetime.now(UTC).isoformat(timespec="seconds")}


def _check_names(
    strategies: Sequence[str],
    models: Sequence[str],
    dtypes: Sequence[str],
    parts: Sequence[str],
    backend: str,
) -> None:
    """Refuse a name that nothing has.

    Raises:
        UserError: with the nearest name that there is.
    """
    from spbench.bench.model_files import names_a_file

    for name in strategies:
        if problem := strategy_problem(name):
            raise UserError(problem)
    check_known("model", [name for name in models if not names_a_file(name)], names("model"))
    check_known("backend", [backend], names("backend"))
    from spbench.impls.models.model import models as all_models  # torch, which mistakes need not wait for
    from spbench.impls.training.step import PRECISIONS

    check_known("dtype", dtypes, list(PRECISIONS))
    check_known("part", parts, sorted({part for model in all_models().values() for part in model.parts()}))


def _options(
    section: str, owners: Sequence[str], given: Sequence[tuple[str, str]], flag: str
) -> dict[str, Any]:
    """Options of strategies or of a backend by name, from texts that YAML reads as the values that scenarios
    have, under the key ``section``.

    Raises:
        UserError: one of the owners has no such option, or not with that value.
    """
    options = option_values(flag, given)
    for owner in owners:
        for path, problem in option_mistakes(section, owner, options):
            raise UserError(f"{flag} of {owner}: {' '.join([*path, problem])}")
    return options


#: what no case is wrong for
_NO_FAULTS = {"green", "unsupported", "as published"}

#: what is said of bytes where no case has anything to compare
NOT_COMPARED = "not compared, as closed forms are of whole models"
#: characters of a variant in the table; JSON and CSV have all
_VARIANT = 36


def _sections(rows: Sequence[Verdict]) -> list[Table | str]:
    """The verdicts by strategy, and each of those that are not green or unsupported."""
    if not rows:
        return []
    named = [row for row in rows if row["status"] not in ("green", "unsupported")]
    red = [row for row in named if row["status"] == "RED"]
    return [_by_strategy(rows), *_each(named), *_explanations(red)]


def _explanations(wrong: Sequence[Verdict]) -> Iterator[str]:
    """Says of each RED strategy where its step goes wrong first, in the case that was run once more, and the
    bytes of all its cases beside the closed forms."""
    for strategy in dict.fromkeys(row["strategy"] for row in wrong):
        mine = [row for row in wrong if row["strategy"] == strategy]
        row = next((row for row in mine if row["explanation"]), mine[0])
        names = ("strategy", "model", "variant", "part", "mesh", "dtype")
        case = " ".join(str(row[name]) for name in names if row[name])
        unequal = [*dict.fromkeys(each["bytes"] for each in mine if each["bytes"] not in ("", EQUAL))]
        compared = EQUAL if any(each["bytes"] == EQUAL for each in mine) else NOT_COMPARED
        where = row["verdict"].split(": ")[0] if row["verdict"] else row["reason"]
        said = [where, *row["explanation"].splitlines(), f"bytes sent: {'; '.join(unequal) or compared}"]
        yield "\n".join([f"Where it goes wrong, {case}:", *(f"  {line}" for line in said)])


def _by_strategy(rows: Sequence[Verdict]) -> Table:
    groups: dict[tuple[str, str], list[Verdict]] = {}
    for row in rows:
        groups.setdefault((row["strategy"], row["dtype"]), []).append(row)
    lines = []
    for (strategy, dtype), mine in groups.items():
        counts = Counter(row["status"] for row in mine)
        worst = max((row["error"] for row in mine if row["status"] == "green"), default=None)
        limit = min((row["limit"] for row in mine if row["limit"] is not None), default=None)
        lines.append(
            {
                "strategy": strategy,
                "dtype": dtype,
                **{status: counts[status] or None for status in dict.fromkeys(("green", *counts))},
                "worst green error": _error(worst),
                "limit": _error(limit),
                "bytes sent": _bytes_of(mine),
            }
        )
    names = dict.fromkeys(name for line in lines for name in line)
    return Table("Verdicts by strategy", [{name: line.get(name) for name in names} for line in lines])


def _error(number: float | None) -> str | None:
    return None if number is None else f"{number:.1e}"


def _bytes_of(rows: Sequence[Verdict]) -> str | None:
    """In how many cases bytes are those of the closed forms; None: no case was compared."""
    compared = [row["bytes"] for row in rows if row["bytes"]]
    unequal = sum(each != EQUAL for each in compared)
    if not compared:
        return None
    return f"unequal in {unequal}" if unequal else f"equal in {len(compared)}"


_COLUMNS = [
    *(Column(name, name) for name in ("strategy", "model")),
    Column("variant", "variant", lambda text: shorten(text, _VARIANT, placeholder=" ...")),
    *(Column(name, name) for name in ("part", "mesh", "dtype", "status")),
    *(Column(name, name, _error) for name in ("error", "limit")),
    *(Column(name, name) for name in ("tensor", "rank")),
    Column("factor", "factor", lambda factor: f"{factor:.4g}"),
]


def _each(rows: Sequence[Verdict]) -> list[Table | str]:
    """The table of verdicts, and below it what is said of those that are not green, each text once."""
    if not rows:
        return []
    texts = [*dict.fromkeys(filter(None, map(_why, rows)))]
    why = Column("why", "why", of=lambda row: f"({texts.index(_why(row)) + 1})" if _why(row) else None)
    title = "Relative errors against the single-device model in fp64: the worst tensor of all ranks"
    important = ("status", "strategy", "model", "part", "mesh", "error", "why", "tensor")
    table = Table.of(title, [*_COLUMNS, why], rows, important=important, below=("variant",))
    reasons = [f"({number}) {text}" for number, text in enumerate(texts, 1)]
    return [table, "\n".join(["Why, by the numbers of the table:", *reasons])] if reasons else [table]


def _why(row: Verdict) -> str:
    """What is wrong, by the verdict or by what was raised."""
    return row["verdict"] or row["reason"]
