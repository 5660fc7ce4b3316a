"""Padding of packed documents: token counts by each program's own rule, written out again here."""

import math
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.traces import trace_key
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.layout import Unsupported
from spbench.impls.models.blocks.packing import padding_rules
from spbench.impls.registries import model_preset
from tests.grid import tabled

LENGTHS = [101, 203, 30, 7]


def cell(program: str, strategy: str = "all_gather_kv", options: Any = None, **sizes: int) -> Cell:
    given = {"documents": LENGTHS, "library": "transformer-engine", **(options or {})}
    of_call = {"model": "llama3-8b", "seq_len": 8192, "batch": 1, "cluster": "dgx-h100", "precision": "bf16"}
    asked = {"strategy": strategy, "program": program, "sizes": sizes, "model_options": given}
    return Cell.model_validate(of_call | asked)


def packed_by(program: str, lengths: list[int], cp: int, tp: int, fp8: str) -> list[int]:
    """The padded lengths of documents, as the sources that padding.yaml names compute them."""
    layout = (2 * cp if cp > 1 else 1) * (1 if program == "automodel" else tp)
    if fp8 != "none" and program == "verl":
        layout = math.lcm(16, layout)
    if fp8 != "none" and program == "megatron" and layout == 1:
        layout = 32 if fp8 == "mxfp8" else 16
    return [n + -n % layout for n in lengths]


@pytest.mark.parametrize("fp8", ["none", "delayed", "mxfp8"])
@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (4, 1), (1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("program", sorted(padding_rules()))
def test_documents_have_the_lengths_that_the_program_gives_them(
    program: str, cp: int, tp: int, fp8: str
) -> None:
    names = ["megatron_sp"] * (tp > 1) + ["all_gather_kv"] * (cp > 1)
    options = {"fp8": fp8, "documents_multiple": program}
    asked = cell("", "+".join(names) or "single", options, **({"tp": tp} if tp > 1 else {}), sp=cp)
    (_, given, _), whole = asked.model_arguments, sum(packed_by(program, LENGTHS, cp, tp, fp8))
    model: Any = model_preset("llama3-8b", {**given, "packed_multiple": 1})
    assert [*model.attended(whole).documents] == packed_by(program, LENGTHS, cp, tp, fp8)
    assert model.padding(whole) * whole == pytest.approx(whole - sum(LENGTHS))


@tabled(__file__, "another_length_of_a_packed_sequence_is_refused_with_the_next")
def test_another_length_of_a_packed_sequence_is_refused_with_the_next(
    program: str, options: Any, multiple: int
) -> None:
    model = model_preset(*cell("", options={**options, "documents_multiple": program}, sp=4).model_arguments)
    assert model.attended(8192)
    with pytest.raises(Unsupported, match=f"multiples of {multiple} tokens; set seq_len {8192 + multiple}"):
        model.attended(8193)


def test_a_job_pads_as_its_program_and_a_number_takes_precedence() -> None:
    share = {
        name: model_preset(*each.model_arguments).padding(8192)
        for name, each in {
            "job": cell("megatron", sp=2),
            "own": cell("megatron", options={"documents_multiple": 8}, sp=2),
            "magi": cell("automodel", "group_cast", sp=2),
            "unknown": cell("deepspeed", sp=2),
            "text": cell("megatron", options={"documents": ()}, sp=2),
        }.items()
    }
    assert share["own"] > share["job"] > 0
    assert share["magi"] == share["unknown"] == 0
    assert share["text"] is None
    with pytest.raises(ValueError, match=r"one of .*verl, not 'vllm'"):
        model_preset(*cell("", options={"documents_multiple": "vllm"}, sp=2).model_arguments)


def test_padding_is_in_the_row_and_padded_tokens_are_computed() -> None:
    """The fault: a trace of the same cell without the program has fewer pairs of a query and a key."""
    options = {"documents": [7, 1], "layers": 1, "vocabulary": 512}
    plain, padded = (cell(program, options=options, sp=2) for program in ("", "megatron"))
    rows = [VirtualEngine().measure(each) for each in (plain, padded)]
    assert [row.padding for row in rows] == [0, pytest.approx(1 - 8 / 12, abs=1e-3)]
    assert rows[0].flops["forward"] < rows[1].flops["forward"]
    assert not any(row.reason for row in rows)
    assert trace_key(plain, 0, True) != trace_key(padded, 0, True)
