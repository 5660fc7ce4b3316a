"""What `spbench fit` says: the answer first, then what holds the memory, then what would help."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.commands.memory_table import memory_table
from spbench.bench.commands.output import Output, Table
from spbench.bench.fit.proofs import Proofs
from spbench.bench.fit.verdict import Verdict, gib, moment_text
from spbench.bench.trust.bands import shown_band, with_band
from spbench.bench.trust.memory_errors import PEAK, RESERVED, past_errors
from spbench.bench.trust.priced_by import priced_by_in_words
from spbench.bench.trust.shown import shown_price

#: a part of the peak below which a kind is not worth a word
_SMALL = 0.002
#: what no number here has in it
NOT_MODELLED = (
    "NCCL's buffers, but those of all-to-alls on clusters that know them",
    "what kernels allocate inside (cuDNN)",
    "settings of PYTORCH_CUDA_ALLOC_CONF other than expandable_segments and max_split_size_mb",
    "blocks that record_stream holds back",
    "what else runs on the card",
)


def report(
    verdicts: Sequence[Verdict],
    others: Sequence[tuple[Cell, str]],
    fullest: Verdict,
    proofs: Proofs | None,
    sizes: Mapping[str, Any] | None,
    remarks: Sequence[str],
    files: Sequence[Path],
    code: int,
) -> Output:
    """The answer for people and for programs.

    Args:
        others: cells that cannot run, with the reasons.
        fullest: the verdict with the least room, which is shown in detail.
        proofs: single changes of it; None: not asked for.
        sizes: as :func:`largest`; None: not asked for.
        remarks: on how the cells were made.
    """
    errors = [each for quantity in (PEAK, RESERVED) if (each := past_errors(_backend(fullest), quantity))]
    sections: list[Table | str] = []
    if len(verdicts) + len(others) > 1:
        sections.append(_cells_table(verdicts, others))
        sections.append(f"in detail: {fullest.cell.key}")
    sections += [str(fullest), *_detail(fullest), *_help(fullest, proofs, sizes)]
    timed = [fullest.measurement, *(proof.measurement for proof in proofs.found)] if proofs else []
    if priced_by := priced_by_in_words(timed):
        sections.append(f"times rest on substitutes: {priced_by}")
    sections.append("\n".join(f"beside real machines: {each}" for each in errors))
    sections.append(f"not modelled: {'; '.join(NOT_MODELLED)}")
    records = [
        *(verdict.record() for verdict in verdicts),
        *({"cell": cell.key, "fits": None, "reason": reason} for cell, reason in others),
    ]
    now_s = fullest.measurement["step_time_s"]
    content = {
        "fits": not others and all(verdict.fits for verdict in verdicts),
        "cells": records,
        "detail": {
            "cell": fullest.cell.key,
            **{name: value for name, value in fullest.anatomy.items() if name != "curve"},
            "priced_by": fullest.measurement.get("priced_by") or [],
            "by_class": fullest.measurement["by_class"],
            "nvidia_smi": fullest.nvidia_smi(),
        },
        "suggestions": proofs
        and {
            "found": [proof.line(now_s) for proof in proofs.found],
            "tried": proofs.tried,
            "closest": proofs.closest and proofs.closest.line(now_s),
        },
        "largest": sizes,
        "errors": [vars(each) for each in errors],
        "not_modelled": list(NOT_MODELLED),
        "remarks": list(remarks),
        "files": [str(path) for path in files],
    }
    return Output(sections, content, records, notes=remarks, files=files, code=code)


def _backend(verdict: Verdict) -> str:
    return verdict.cell.training.backend


def _cells_table(verdicts: Sequence[Verdict], others: Sequence[tuple[Cell, str]]) -> Table:
    lines = [
        {
            "cell": each.cell.key,
            "fits": "yes" if each.fits else "no",
            "spare GiB": _signed_gib(each.usable_bytes - each.needed_bytes),
            "peak GiB": gib(each.anatomy["peak_memory_bytes"]),
            "on": each.where,
        }
        for each in verdicts
    ]
    lines += [
        {"cell": cell.key, "fits": "-", "spare GiB": "", "peak GiB": "", "on": reason}
        for cell, reason in others
    ]
    return Table("Which cells fit", lines)


def _signed_gib(nbytes: int) -> str:
    return f"{'-' if nbytes < 0 else ''}{gib(abs(nbytes))}"


def _detail(verdict: Verdict) -> Iterator[Table | str]:
    """What holds the peak, the classes of ranks, and what nvidia-smi would show."""
    anatomy = verdict.anatomy
    peak = anatomy["peak_memory_bytes"]
    lines = [
        {
            "what": part["kind"].replace("_", " ") or "others",
            "made in": part["module"] or None,
            "tensors": part["tensors"],
            "GiB": gib(part["bytes"]),
            "share": f"{part['bytes'] / peak:.0%}",
        }
        for part in anatomy["parts"]
    ]
    held = ", ".join(
        f"{name.replace('_', ' ')} {gib(n)}" for name, n in anatomy["held"].items() if n > _SMALL * peak
    )
    yield f"allocated then: {gib(peak)} GiB: {held}"
    yield Table(f"What holds the peak ({moment_text(anatomy['moment'])})", lines)
    yield memory_table({verdict.cell.key: verdict.measurement})
    shown = verdict.nvidia_smi()
    context, nccl = shown["context_bytes"], shown["nccl_bytes"]
    whole = shown["reserved_bytes"] + (context or 0) + (nccl or 0)
    of_context = "not known" if context is None else f"{gib(context)} ({shown['context_source']})"
    yield (
        f"nvidia-smi: {gib(whole)} GiB = reserved by PyTorch {gib(shown['reserved_bytes'])} + CUDA context "
        f"{of_context} + NCCL's buffers, {'not known' if nccl is None else f'{gib(nccl)} for all-to-alls'}"
    )
    if on_host := verdict.on_host():
        yield on_host


def _help(verdict: Verdict, proofs: Proofs | None, sizes: Mapping[str, Any] | None) -> Iterator[Table | str]:
    """The changes that help, and the largest sizes that fit."""
    if proofs is not None:
        what = "take less memory" if verdict.fits else "make it fit"
        if proofs.found:
            title = (
                f"Single changes that {what} ({proofs.tried} tried, these traced whole), the fastest first"
            )
            yield Table(title, [*_change_lines(verdict, proofs)])
        else:
            now_s = verdict.measurement["step_time_s"]
            yield f"none of {proofs.tried} single changes would {what}{_closest(proofs, now_s)}"
    if sizes is not None:
        length, batch = sizes["seq_len"], sizes["micro_batch"]
        whole = f" (batch {sizes['batch']})" if batch else ""
        yield (
            f"the longest length that fits: {length or 'none'}; the largest micro-batch: {batch or 'none'}"
            f"{whole}; each with all else as it is"
        )


def _closest(proofs: Proofs, now_s: float | None) -> str:
    near = proofs.closest
    if near is None:
        return ""
    line = near.line(now_s)
    ratio = line["relative_step_time"]
    needs = f"{gib(line['needed_bytes'])} GiB"
    needs += f" and {shown_price(ratio)} of the step's time" if ratio else ""
    return f"; the nearest, --set {line['set']}, needs {needs}: --set it, and ask again"


def _change_lines(verdict: Verdict, proofs: Proofs) -> Iterator[dict[str, Any]]:
    now_s = verdict.measurement["step_time_s"]
    yield {
        "--set": "(as it is)",
        "needs GiB": gib(verdict.needed_bytes),
        "spare GiB": _signed_gib(verdict.usable_bytes - verdict.needed_bytes),
        "step": _step(verdict.cell, verdict.measurement),
        "step, relative": None,
        "what": None,
    }
    for proof in proofs.found:
        line = proof.line(now_s)
        ratio = line["relative_step_time"]
        yield {
            "--set": line["set"],
            "needs GiB": gib(line["needed_bytes"]),
            "spare GiB": _signed_gib(verdict.usable_bytes - line["needed_bytes"]),
            "step": _step(proof.cell, proof.measurement),
            "step, relative": ratio and shown_price(ratio),
            "what": line["what"],
        }


def _step(cell: Cell, measurement: Mapping[str, Any]) -> str:
    row = {"cell": cell.model_dump(), "measurement": measurement}
    return shown_band(with_band(row)["measurement"]) or "not timed"
