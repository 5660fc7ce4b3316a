"""What `spbench fit` says: the answer and what would help, then what holds the memory, and details."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.command_line.memory_table import memory_table
from spbench.bench.command_line.output import Output, Table
from spbench.bench.measure.scenarios.setting_changes import written
from spbench.bench.measure.trust.bands import (
    PEAK,
    RESERVED,
    past_errors,
    priced_by_in_words,
    shown_band,
    with_band,
)
from spbench.bench.tools.fit.fit_verdict import Verdict, gib, moment_text
from spbench.bench.tools.fit.proofs import Proof, Proofs
from spbench.bench.tools.jobs.flags import FlagChanges, flag_changes
from spbench.bench.units import shown_price

#: a part of the peak below which a kind is not worth a word
_SMALL = 0.002
#: parts of the peak, and changes, that a terminal shows where no details are asked for
_PARTS, _CHANGES = 4, 2
#: what no number here has in it
NOT_MODELLED = (
    "NCCL's buffers, but those of all-to-alls on clusters that know them",
    "what kernels allocate inside (cuDNN)",
    "settings of PYTORCH_CUDA_ALLOC_CONF other than expandable_segments and max_split_size_mb",
    "blocks that record_stream holds back",
    "what else runs on the card",
)


@dataclass(frozen=True)
class Help:
    """What may help.

    Attributes:
        proofs: changes of the fullest cell; None: not asked for.
        sizes: as :func:`largest`; None: not asked for.
        job: the kind of job whose arguments changes are also told in; "": of none.
        advise: the command line that searches for another layout.
    """

    proofs: Proofs | None = None
    sizes: Mapping[str, Any] | None = None
    job: str = ""
    advise: str = ""


def report(
    verdicts: Sequence[Verdict],
    others: Sequence[tuple[Cell, str]],
    fullest: Verdict,
    helping: Help,
    remarks: Sequence[str],
    files: Sequence[Path],
    code: int,
) -> Output:
    """The answer for people and for programs.

    Args:
        others: cells that cannot run, with the reasons.
        fullest: the verdict with the least room, which is shown in detail.
        remarks: on how the cells were made.
    """
    errors = [each for quantity in (PEAK, RESERVED) if (each := past_errors(_backend(fullest), quantity))]
    sections: list[Table | str] = []
    details: list[Table | str] = []
    if len(verdicts) + len(others) > 1:
        sections.append(_cells_table(verdicts, others))
        sections.append(f"the fullest: {fullest.cell.key}")
    sections.append("\n".join([str(fullest), *_first_change(fullest, helping)]))
    sections += [*_help(fullest, helping), *_holding(fullest)]
    # where it does not fit, what would help takes the place of what is there
    (sections if fullest.fits else details).append(_parts(fullest))
    timed = [proof.measurement for proof in helping.proofs.found] if helping.proofs else []
    if priced_by := priced_by_in_words([fullest.measurement, *timed] if timed else []):
        sections.append(f"priced by something else, with shares of the step: {priced_by}")
    details.append(memory_table({fullest.cell.key: fullest.measurement}))
    details.append("\n".join(f"beside real machines: {each}" for each in errors))
    details.append(f"not modelled: {'; '.join(NOT_MODELLED)}")
    records = [
        *(verdict.record() for verdict in verdicts),
        *({"cell": cell.key, "fits": None, "reason": reason} for cell, reason in others),
    ]
    content = {
        "fits": not others and all(verdict.fits for verdict in verdicts),
        "cells": records,
        "detail": {
            "cell": fullest.cell.key,
            **{name: value for name, value in fullest.anatomy.items() if name != "curve"},
            "priced_by": fullest.measurement.get("priced_by") or [],
            "by_class": fullest.measurement["by_class"],
        },
        "suggestions": helping.proofs and _as_data(fullest, helping, helping.proofs),
        "largest": helping.sizes,
        "errors": [vars(each) for each in errors],
        "not_modelled": list(NOT_MODELLED),
        "remarks": list(remarks),
        "files": [str(path) for path in files],
    }
    return Output(sections, content, records, notes=remarks, files=files, code=code, details=details)


def _as_data(fullest: Verdict, helping: Help, proofs: Proofs) -> dict[str, Any]:
    """The changes for programs."""
    now_s = fullest.measurement["step_time_s"]
    return {
        "found": [
            {**proof.line(now_s), "flags": str(_flags(fullest, proof, helping) or "")}
            for proof in proofs.found
        ],
        "tried": proofs.tried,
        "pairs_tried": proofs.pairs_tried,
        "closest": proofs.closest and proofs.closest.line(now_s),
        "advise": helping.advise,
    }


def _backend(verdict: Verdict) -> str:
    return verdict.cell.training.backend


def _cells_table(verdicts: Sequence[Verdict], others: Sequence[tuple[Cell, str]]) -> Table:
    lines = [
        {
            "cell": each.cell.key,
            "fits": "yes" if each.fits else "no",
            "needs GiB": gib(each.memory.total_bytes),
            "spare GiB": _signed_gib(each.memory.spare_bytes),
            "on": each.where,
        }
        for each in verdicts
    ]
    lines += [
        {"cell": cell.key, "fits": "-", "needs GiB": "", "spare GiB": "", "on": reason}
        for cell, reason in others
    ]
    return Table("Which cells fit", lines, ("cell", "fits", "spare GiB", "needs GiB"), below=("on",))


def _signed_gib(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{gib(abs(nbytes))}"


def _holding(verdict: Verdict) -> Iterator[Table | str]:
    """The number that decides, beside others that programs show; and of what kinds the peak is."""
    anatomy = verdict.anatomy
    title = "Memory of the fullest ranks: what is needed decides"
    yield Table(title, [*_numbers(verdict)], ("GiB", "memory"), below=("of",))
    least = _SMALL * anatomy["peak_memory_bytes"]
    held = (f"{name.replace('_', ' ')} {gib(n)}" for name, n in anatomy["held"].items() if n > least)
    yield f"allocated at the peak: {', '.join(held)}"
    if on_host := verdict.on_host():
        yield on_host


def _numbers(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Four numbers of one memory, the one that decides first."""
    anatomy, memory = verdict.anatomy, verdict.memory
    context, nccl = (
        "unknown" if nbytes is None else gib(nbytes) for nbytes in (memory.context_bytes, memory.nccl_bytes)
    )
    of_needed = f"least of PyTorch {gib(memory.tensors_bytes)}, CUDA context {context}, NCCL {nccl}"
    for what, nbytes, meaning in (
        ("needed", memory.total_bytes, of_needed),
        ("allocated", anatomy["peak_memory_bytes"], "torch.cuda.max_memory_allocated"),
        ("reserved", anatomy["reserved_memory_bytes"], "torch.cuda.max_memory_reserved where room is ample"),
        ("nvidia-smi", verdict.shown_by_nvidia_smi, "reserved on this card, CUDA context, NCCL"),
    ):
        yield {"memory": what, "GiB": gib(nbytes), "of": meaning}


def _parts(verdict: Verdict) -> Table:
    """What holds the peak, by kind and the module in whose forward or backward it was made."""
    anatomy = verdict.anatomy
    lines = [
        {
            "what": part["kind"].replace("_", " ") or "others",
            "made in": part["module"] or None,
            "tensors": part["tensors"],
            "GiB": gib(part["bytes"]),
            "share": f"{part['bytes'] / anatomy['peak_memory_bytes']:.0%}",
        }
        for part in anatomy["parts"]
    ]
    return Table(f"What holds the peak ({moment_text(anatomy['moment'])})", lines, most=_PARTS)


def _first_change(verdict: Verdict, helping: Help) -> Iterator[str]:
    """The line on the fastest change that makes it fit, where it does not."""
    if helping.proofs is None or verdict.fits:
        return
    if not helping.proofs.found:
        yield f"no change makes it fit: {_tried(helping.proofs)}"
        return
    first = helping.proofs.found[0]
    price = _price(verdict, first)
    told = f"{gib(first.memory.spare_bytes)} GiB to spare" + (f", step {price}" if price else "")
    flags = str(_flags(verdict, first, helping) or "")
    yield f"makes it fit: {flags or '--set ' + written(first.change.settings)} ({told})"


def _price(verdict: Verdict, proof: Proof) -> str:
    ratio = proof.line(verdict.measurement["step_time_s"])["relative_step_time"]
    return shown_price(ratio) if ratio else ""


def _flags(verdict: Verdict, proof: Proof, helping: Help) -> FlagChanges | None:
    """The change in the job's own arguments; None: it is of no job, or one that is not written."""
    return flag_changes(verdict.cell, proof.cell, helping.job) if helping.job else None


def _tried(proofs: Proofs) -> str:
    pairs = f" and {proofs.pairs_tried} pairs of them" if proofs.pairs_tried else ""
    return f"{proofs.tried} single ones{pairs} tried"


def _help(verdict: Verdict, helping: Help) -> Iterator[Table | str]:
    """The changes that help, and the largest sizes that fit."""
    if (proofs := helping.proofs) is not None:
        what = "take less memory" if verdict.fits else "make it fit"
        if proofs.found:
            title = f"Changes that {what}, the fastest first ({_tried(proofs)})"
            columns = ("needs GiB", "spare GiB", "step", "step, relative")
            lines = [*_change_lines(verdict, helping, proofs)]
            yield Table(title, lines, columns, below=("--set", "flags", "what"), most=_CHANGES)
        elif proofs.closest is not None:
            yield _closest(verdict, proofs.closest)
        yield f"for another layout: {helping.advise}"
    if (sizes := helping.sizes) is not None:
        length, batch = sizes["seq_len"], sizes["micro_batch"]
        whole = f" (batch {sizes['batch']})" if batch else ""
        yield (
            f"the longest length that fits: {length or 'none'}; the largest micro-batch: {batch or 'none'}"
            f"{whole}; each with all else as it is"
        )


def _closest(verdict: Verdict, near: Proof) -> str:
    price = _price(verdict, near)
    needs = f"{gib(near.memory.total_bytes)} GiB" + (f" and {price} of the step's time" if price else "")
    return f"the nearest, --set {written(near.change.settings)}, needs {needs}: --set it, and ask again"


def _change_lines(verdict: Verdict, helping: Help, proofs: Proofs) -> Iterator[dict[str, Any]]:
    for proof in proofs.found:
        flags = _flags(verdict, proof, helping)
        lacking = flags and f"{flags.program.split()[0]} has no {'; no '.join(flags.missing)}"
        yield {
            "--set": written(proof.change.settings),
            "flags": flags and (str(flags) or lacking),
            "needs GiB": gib(proof.memory.total_bytes),
            "spare GiB": _signed_gib(proof.memory.spare_bytes),
            "step": _step(proof.cell, proof.measurement),
            "step, relative": _price(verdict, proof) or None,
            "what": proof.change.words,
        }


def _step(cell: Cell, measurement: Mapping[str, Any]) -> str:
    row = {"cell": cell.model_dump(), "measurement": measurement}
    return shown_band(with_band(row)["measurement"]) or "not timed"
