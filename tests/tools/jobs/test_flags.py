"""Cells as the flags of programs: read back they are the same cell, and what a program has not is named."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed, load_scenario
from spbench.bench.tools.jobs import to_megatron
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.flag_changes import flag_changes
from spbench.bench.tools.jobs.flags import Flags, differences, program_flags
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.papers.megatron_cases import cases
from spbench.impls.registries import model_preset
from tests.tools.jobs.job_inputs import data, tabled

BOTH: dict[str, Any] = data(__file__)["BOTH"]
MEGATRON = BOTH | {
    "strategy": "tensor_parallel",
    "sizes": {"dp": 8},
    "batch": 64,
    "model_options": {"library": "transformer-engine", "cross_entropy": "fused"},
    "training": {"backend": "megatron", "moments": "later", "steps": 2},
}
TORCHTITAN = BOTH | {
    "strategy": "single",
    "sizes": {"dp": 8},
    "batch": 64,
    "mesh": ["dp", "cp", "sp", "tp"],
    "model_options": {"separate_projections": True, "attention": "flash_attention_2"},
    "training": MEGATRON["training"]
    | {"backend": "zero3", "wrap": "embedding", "reduce_dtype": "fp32"}
    | {"cuda_alloc_conf": "expandable_segments:True"},
}


def cell(base: dict[str, Any], **changes: Any) -> Cell:
    """The cell with other values; those of sections are added to what is there."""
    merged = {
        name: {**base[name], **value} if isinstance(base.get(name), dict) else value
        for name, value in changes.items()
    }
    return Cell.model_validate(base | merged)


def read_back(kind: str, cell: Cell, found: Flags, text: str | None = None) -> Job:
    content = (found.text() if text is None else text).encode()
    return read_job(kind, [JobFile(Path(found.file), content)], cluster=cell.cluster)


def same(cell: Cell, other: Cell) -> bool:
    """Whether two cells are equal, but for how the same model is written."""
    models = [model_preset(*each.model_arguments) for each in (cell, other)]
    of_model = {"model": "", "model_options": {}, "program": ""}
    sizes = [{axis: n for axis, n in each.mesh_sizes.items() if n > 1} for each in (cell, other)]
    rest = [each.model_copy(update={**of_model, "mesh": None}) for each in (cell, other)]
    return models[0] == models[1] and [*sizes[0].items()] == [*sizes[1].items()] and rest[0] == rest[1]


@st.composite
def megatron_cells(draw: st.DrawFn) -> Cell:
    """Layouts and steps, as the importer writes them."""
    size = st.sampled_from([1, 2, 4])
    sizes = {axis: draw(size) for axis in ("tp", "pp", "dp")}
    around = "megatron_sp" if sizes["tp"] > 1 and draw(st.booleans()) else "tensor_parallel"
    options = {"vocabulary": "split"} if around == "megatron_sp" else {}
    within = draw(
        st.sampled_from(["", "ring_attention", "ulysses", "all_gather_kv", "ulysses+ring_attention"])
    )
    if within:
        options |= {} if within == "ulysses" else {"placement": "zigzag"}
        sizes |= {"sp": 2} | ({"cp": draw(st.sampled_from([2, 4]))} if "+" in within else {})
    parts = draw(st.integers(1, 4)) * sizes["pp"]
    training: dict[str, Any] = {"micro_batches": parts}
    if sizes["pp"] > 1 and draw(st.booleans()):
        overlaps = sizes["pp"] == 2 or draw(st.booleans())
        training |= {"schedule": "interleaved", "virtual_stages": 2, "overlap_p2p_communication": overlaps}
    elif sizes["pp"] > 1 and draw(st.booleans()):
        training["stage_layers"] = [6, *[8] * (sizes["pp"] - 2), 32 - 6 - 8 * (sizes["pp"] - 2)]
    precision = draw(st.sampled_from(["bf16", "fp16", "fp32"]))
    if draw(st.booleans()):
        training |= {"distributed_optimizer": True, "overlap_grad_reduce": draw(st.booleans())}
        if draw(st.booleans()):
            training |= {"optimizer": "host", "overlap_cpu_optimizer_d2h_h2d": draw(st.booleans())}
            if precision != "fp16":
                training["optimizer_offload_fraction"] = draw(st.sampled_from([0.25, 1.0]))
        training["overlap_param_gather"] = training["overlap_grad_reduce"] and draw(st.booleans())
        if training["overlap_param_gather"] and "schedule" in training:
            training["align_param_gather"] = draw(st.booleans())
    training["gradient_accumulation_fusion"] = draw(st.booleans())
    if precision != "fp32":
        training["accumulate_allreduce_grads_in_fp32"] = draw(st.booleans())
    again = draw(st.sampled_from(["none", "selective", "full"]))
    model: dict[str, Any] = {"recompute": again, "attention": draw(st.sampled_from(["flash", "cudnn"]))}
    if within not in ("", "ulysses"):
        model["attention_dropout"] = 0.0
    if again == "full":
        model |= {"recompute_method": draw(st.sampled_from(["uniform", "block"])), "recompute_layers": 2}
    name = draw(st.sampled_from(["llama3-8b", "gpt3-7b"]))
    model |= {"max_positions": 4096} if name == "gpt3-7b" else {}
    return cell(
        MEGATRON,
        strategy=f"{around}+{within}" if within else around,
        strategy_options=options,
        sizes=sizes,
        mesh=["dp", "pp", "cp", "sp", "tp"] if draw(st.booleans()) else BOTH["mesh"],
        batch=draw(st.integers(1, 4)) * parts * sizes["dp"],
        seq_len=1024 * draw(st.integers(1, 4)),
        precision=precision,
        model=name,
        model_options=model,
        training=training,
    )


@settings(deadline=None, max_examples=50, derandomize=True)
@given(megatron_cells())
def test_flags_of_megatron_are_the_same_cell_again(cell: Cell) -> None:
    found = program_flags("megatron", cell)
    assert (found.missing, found.beside) == ((), ())
    assert same(cell, read_back("megatron", cell, found).cell())


@tabled(__file__, "stages_of_any_numbers_of_layers")
def test_stages_of_any_numbers_of_layers(layers: list[int], virtual: int, written: str) -> None:
    training = {"micro_batches": 8, "stage_layers": layers, "virtual_stages": virtual}
    training |= {"schedule": "interleaved", "overlap_p2p_communication": True} if virtual > 1 else {}
    model = {"layers": sum(layers)}
    one = cell(MEGATRON, sizes={"dp": 2, "pp": 4}, batch=16, model_options=model, training=training)
    found = program_flags("megatron", one)
    assert found.missing == ()
    assert written in found.text()
    assert same(one, read_back("megatron", one, found).cell())


def test_a_flag_that_is_left_out_is_found() -> None:
    """The cell has no flag that is as Megatron-LM has it anyway."""
    one = cell(
        MEGATRON,
        strategy="megatron_sp+ulysses+ring_attention",
        strategy_options={"vocabulary": "split", "placement": "zigzag"},
        sizes={"dp": 2, "tp": 4, "pp": 4, "sp": 2, "cp": 2},
        model_options={"recompute": "full", "recompute_method": "block", "recompute_layers": 2},
        training={
            "micro_batches": 8,
            "distributed_optimizer": True,
            "gradient_accumulation_fusion": False,
            "schedule": "interleaved",
            "virtual_stages": 2,
            "microbatch_group_size": 8,
            "bucket_size": 1000,
            "cublas_workspace": ":4096:8",
        },
    )
    found = program_flags("megatron", one)
    assert found.missing == found.beside == ()
    lines = found.text().splitlines()
    flags = [line for line in lines if line.strip().startswith("--") or "CUBLAS" in line]
    assert len(flags) == len(found.lines) == 39
    for line in flags:
        without = "\n".join(each for each in lines if each != line).removesuffix("\\")
        job = read_back("megatron", one, found, without)
        left_out = "--attention-dropout" in line and any("dropout" in each for each in job.remarks)
        assert job.refusal() or [*differences(one, job.cell())] or left_out, line


def test_a_fault_of_the_way_back_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    table = argument_table("megatron")
    wrong = {name: each for name, each in table.settings.items() if name != "--hidden-dropout"}
    wrong["--kv-channels"] = wrong["--num-attention-heads"]
    monkeypatch.setattr(to_megatron, "argument_table", lambda _: replace(table, settings=wrong))
    assert program_flags("megatron", cell(MEGATRON)).missing == (
        "model_options.head_dim null (it has 32)",
        "model_options.dropout 0.0 (it has 0.1)",
    )


@tabled(__file__, "what_megatron_has_not_is_named")
def test_what_megatron_has_not_is_named(changes: dict[str, Any], missing: str) -> None:
    found = program_flags(
        "megatron",
        Cell.model_validate(
            MEGATRON | changes | {"training": MEGATRON["training"] | changes.get("training", {})}
        ),
    )
    assert [line for line in found.missing if line.startswith(missing)], found.missing
    with pytest.raises(UserError, match=r"^Megatron-LM has no "):
        found.text()


@tabled(__file__, "a_changed_cell_in_the_words_of_the_program")
def test_a_changed_cell_in_the_words_of_the_program(kind: str, changes: dict[str, Any], flags: str) -> None:
    before = cell(TORCHTITAN if kind == "torchtitan" else MEGATRON)
    found = flag_changes(before, changed(before, changes), kind)
    assert found is not None
    assert (str(found), bool(found.missing)) == (flags, not flags)


def test_flags_that_a_change_takes_away() -> None:
    before = cell(MEGATRON, training={"distributed_optimizer": True, "overlap_grad_reduce": True})
    after = cell(MEGATRON | {"training": {"backend": "zero3", "moments": "later", "steps": 2}})
    found = flag_changes(before, after, "megatron")
    assert found is not None
    assert "--use-torch-fsdp2" in found.given
    assert str(found).endswith(", without --use-distributed-optimizer --overlap-grad-reduce")
    assert flag_changes(before, after, "a program without flags") is None
    again = cell(MEGATRON, model_options={"recompute": "full"}, training={"distributed_optimizer": True})
    keys = flag_changes(again, cell(MEGATRON), "bridge")
    assert keys is not None
    assert {"model.recompute_granularity=null", "ddp.use_distributed_optimizer=false"} <= {*keys.given}


@pytest.mark.parametrize(("name", "cells"), [("megatron_b200", 12), ("megatron_b200_more", 15), ("usp", 80)])
def test_cells_of_megatron(name: str, cells: int) -> None:
    found = [cell for variant in load_scenario(name).cells.values() for cell in variant]
    assert len(found) == cells
    assert [program_flags("megatron", cell).missing for cell in found] == [()] * cells


@pytest.mark.slow
def test_megatrons_functional_tests_and_back() -> None:
    """All that are imported are the same cells again, but for BERT's and hybrids'."""
    back = 0
    for case in cases():
        try:
            cell = case.job.cell()
        except UserError:
            continue
        found = program_flags("megatron", cell)
        if cell.model.startswith(("bert", "nemotron-h")):
            assert found.missing
            continue
        assert found.missing == ()
        unlike = {path for path, *_ in differences(cell, read_back("megatron", cell, found).cell())}
        # which a job has by its container, of which no argument speaks
        assert unlike <= {"model_options.autotune_copies", "model_options.autotune_flush_kib"}
        back += 1
    assert back >= 450
