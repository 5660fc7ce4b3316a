"""`spbench fit`: its answer, its exit codes, and suggestions that hold when they are run by hand."""

from __future__ import annotations

import json
import pickle
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.cuda._memory_viz as viewer

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.scenarios.setting_changes import changed, given
from spbench.bench.measurement import Measurement
from spbench.bench.tools.fit import subject as module
from spbench.bench.tools.fit.fit_command import command
from spbench.bench.tools.fit.fit_report import Help, _closest, _flags
from spbench.bench.tools.fit.fit_verdict import Verdict
from spbench.bench.tools.fit.proofs import Proof
from spbench.bench.tools.fit.subject import Asked, Subject, subject
from spbench.bench.tools.fit.suggestions import Change
from tests.tools.advise.questions import small_cards
from tests.tools.commands.conftest import Run

#: needs some 50 MiB at 1,024 positions, and 190 at 4,096
TINY = ("causal-transformer-tiny", "--gpus", "2", "--batch", "8", "--set", "model_options.layers=6")
Card = Callable[[int], str]


def shorter(card: str) -> tuple[str, ...]:
    return (*TINY, "--cluster", card, "--seq-len", "1K")


def longer(card: str) -> tuple[str, ...]:
    return (*TINY, "--cluster", card, "--seq-len", "4K")


def test_the_first_lines_say_yes_and_by_how_much(fit: Run, card: Card) -> None:
    code, out, _ = fit(*shorter(card(100)), "--must-fit")
    assert code == 0
    assert "not said, so taken: precision bf16, strategy single, training.backend zero3; --set" in out
    first, second, *_ = out.splitlines()
    shown = re.fullmatch(r"fits: yes, (\S+) GiB to spare \(needs (\S+) of (\S+) GiB\)", first)
    assert shown is not None
    spare, needed, has = map(float, shown.groups())
    assert spare == pytest.approx(has - needed, abs=1e-3)
    assert second == "on the fullest, ranks 0-1 (step 2, backward, in FSDPDecoder)"
    assert re.search(r"\| activations +\| blocks\.\*\.mlp +\| +12 \|", out)
    assert "beside real machines: peak of " in out


def test_four_numbers_of_one_memory_are_told_apart(fit: Run, card: Card) -> None:
    path = Path(card(100))
    of_peer = f"  memory_peer_bytes: {{value: {2**24}, source: made up}}\nnetwork:"
    path.write_text("devices_per_node: 2" + path.read_text().replace("network:", of_peer))
    _, out, _ = fit(*shorter(str(path)), "--strategy", "ulysses", "--set", "sizes.sp=2")
    rows = {
        name: float(nbytes)
        for name, nbytes in re.findall(r"^\| (needed|allocated|reserved|nvidia-smi) +\| +(\S+) \|", out, re.M)
    }
    of_needed = re.search(r"least of PyTorch (\S+), CUDA context (\S+), NCCL (\S+) ", out)
    assert of_needed is not None
    assert rows["needed"] == pytest.approx(sum(map(float, of_needed.groups())), abs=2e-4)
    assert of_needed[3] == "0.0156"
    assert rows["allocated"] <= rows["needed"] <= rows["nvidia-smi"]


def test_what_is_printed_for_programs(fit: Run, card: Card) -> None:
    code, out, _ = fit(*shorter(card(100)), "--format", "json")
    content = json.loads(out)
    assert code == 0
    assert {"fits", "cells", "detail", "suggestions", "largest", "errors", "not_modelled"} <= content.keys()
    (line,), detail = content["cells"], content["detail"]
    assert content["fits"] is line["fits"] is True
    assert line["card_bytes"] == line["spare_bytes"] + line["total_bytes"]
    assert line["peak_memory_bytes"] <= line["total_bytes"] <= line["nvidia_smi_bytes"]
    assert (
        sum(detail["held"].values()) == sum(p["bytes"] for p in detail["parts"]) == line["peak_memory_bytes"]
    )
    assert [entry["step"] for entry in detail["by_class"]] == [0, 1, 2]
    assert max(entry["peak_memory_bytes"] for entry in detail["by_class"]) == line["peak_memory_bytes"]
    assert (line["ranks"], line["step"], line["phase"]) == ("0-1", 2, "backward")


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_job_that_does_not_fit_gets_changes_that_hold(
    fit: Run, card: Card, every: bool, request: pytest.FixtureRequest
) -> None:
    if not every:
        request.getfixturevalue("few_changes")
    cluster = card(100)
    code, out, _ = fit(*longer(cluster), "--must-fit", "--format", "json")
    assert code == 1
    content = json.loads(out)
    assert content["fits"] is False
    found = content["suggestions"]["found"]
    sets = [each["set"] for each in found]
    assert "model_options.recompute=full" in sets
    assert "training.micro_batches=4" in sets
    assert [each["other_job"] for each in found] == sorted(each["other_job"] for each in found)
    for each in found if every else found[:1]:  # to the byte, asked again and measured by itself
        again = json.loads(fit(*longer(cluster), "--set", each["set"], "--must-fit", "--format", "json")[1])
        assert again["cells"][0]["total_bytes"] == each["total_bytes"]
        pairs = [tuple(pair.split("=")) for pair in each["set"].split(",")]
        assert measured(cluster, dict(given(pairs))) == each["peak_memory_bytes"]


def measured(cluster: str, settings: dict[str, Any]) -> int | None:
    return run(cluster, settings).peak_memory_bytes


def run(cluster: str, settings: dict[str, Any]) -> Measurement:
    cell = Cell(
        model="causal-transformer-tiny",
        strategy="single",
        sizes={"dp": 2},
        batch=8,
        seq_len=4096,
        cluster=cluster,
        precision="bf16",
        training={"backend": "zero3", "moments": "later", "steps": 2},
        model_options={"layers": 6},
    )
    return VirtualEngine().measure(changed(cell, settings))


@pytest.mark.slow
def test_each_change_that_is_said_to_fit_does(fit: Run, few_changes: None, tmp_path: Path) -> None:
    cluster = small_cards(tmp_path, 100)
    content = json.loads(fit(*longer(cluster), "--format", "json")[1])
    found = content["suggestions"]["found"]
    assert "model_options.recompute=full" in {each["set"] for each in found}
    for each in found:
        pairs = [tuple(pair.split("=")) for pair in each["set"].split(",")]
        made = run(cluster, dict(given(pairs)))
        assert made.status == "ok"
        assert each["step_time_s"] == made.step_time_s
        assert each["spare_bytes"] == each["card_bytes"] - each["total_bytes"] >= 0
    (cell,) = content["cells"]
    assert cell["spare_bytes"] == cell["card_bytes"] - cell["total_bytes"] < 0
    # the command line that looks for another layout asks about the same
    words = shlex.split(content["suggestions"]["advise"])
    assert words[:4] == ["spbench", "advise", "--model", "causal-transformer-tiny"]
    assert words[4:] == [
        *("--cluster", cluster, "--gpus", "2", "--seq-len", "4096", "--batch", "8"),
        *("--set", "model_options.layers=6"),
    ]


@pytest.mark.slow
def test_each_change_is_there_as_it_is_typed_with_its_price_in_time(
    fit: Run, few_changes: None, tmp_path: Path
) -> None:
    code, out, _ = fit(*longer(small_cards(tmp_path, 100)))
    assert code == 0
    verdict, _, change = out.splitlines()[:3]
    assert verdict.startswith("fits: no, 0.109 GiB are missing (needs 0.216 of 0.107 GiB)")
    assert change.startswith("makes it fit: --set model_options.recompute=full (0.0293 GiB to spare, step +")
    (line,) = (line for line in out.splitlines() if line.startswith("| model_options.recompute=full "))
    # timed on a card with room for both
    times = [run("dgx-a100", settings).step_time_s for settings in ({}, {"model_options.recompute": "full"})]
    assert None not in times
    now, again = (seconds or 0.0 for seconds in times)
    assert again > 1.1 * now
    assert f" {again / now - 1:+.0%} |" in line


@pytest.mark.slow
def test_where_nothing_helps_the_nearest_is_named(fit: Run, card: Card, few_changes: None) -> None:
    code, out, _ = fit(*longer(card(4)), "--must-fit")
    assert code == 1
    assert re.search(r"^no change makes it fit: \d+ single ones and \d+ pairs of them tried$", out, re.M)
    assert "the nearest, --set " in out


@pytest.mark.parametrize(
    ("ratio", "shown"), [(None, None), (1.0061, "+0.6%"), (0.9999, "+0.0%"), (1.298, "+30%")]
)
def test_a_price_in_time_has_the_digits_that_tell(ratio: float | None, shown: str | None) -> None:
    cell = Cell(model="causal-transformer-tiny", strategy="single", batch=2, seq_len=64, cluster="l40s")
    measurement = {"step_time_s": ratio, "peak_memory_bytes": 2**30, "usable_memory_bytes": 2**29}
    change = Proof(Change({"batch": 2}, ""), cell, measurement, False)
    said = _closest(Verdict(cell, {**measurement, "step_time_s": 1.0}), change)
    assert said.startswith("the nearest, --set batch=2, needs 1.00 GiB")
    assert (f" and {shown} of the step's time" in said) == (shown is not None)


@pytest.mark.slow
def test_the_largest_sizes_that_fit(fit: Run, card: Card) -> None:
    cluster = card(100)
    _, out, _ = fit(*shorter(cluster), "--longest", "--format", "json")
    found = json.loads(out)["largest"]
    assert found["batch"] == 2 * found["micro_batch"]
    for size, fits in ((found["seq_len"], True), (found["seq_len"] + 1, False)):
        shown = json.loads(fit(*shorter(cluster)[:-2], "--seq-len", str(size), "--format", "json")[1])
        assert shown["fits"] is fits


def test_a_figure_and_a_snapshot(fit: Run, card: Card) -> None:
    code, out, _ = fit(
        *shorter(card(100)), "--figure", "new/m.png", "--snapshot", "m.pickle", "--format", "json"
    )
    assert code == 0
    assert Path("new/m.png").read_bytes().startswith(b"\x89PNG")
    content = pickle.loads(Path("m.pickle").read_bytes())
    reserved = sum(segment["total_size"] for segment in content["segments"])
    assert reserved == json.loads(out)["cells"][0]["reserved_memory_bytes"]
    assert "segments: " in viewer.segsum(content)  # which checks that sizes add up
    viewer.trace_plot(content)


SEVERAL = """
title: Several
defaults: {model: causal-transformer-tiny, batch: 4, engine: distributed, cluster: CARD}
groups:
  - {strategy: ulysses, sizes: {sp: 2}, seq_len: [64, 4096]}
  - {strategy: ulysses, sizes: {sp: 5}, seq_len: 60}
"""


@pytest.mark.slow
def test_several_cells_have_a_line_each(fit: Run, card: Card, few_changes: None) -> None:
    Path("several.yaml").write_text(SEVERAL.replace("CARD", card(20)))
    code, out, _ = fit("several.yaml", "--must-fit", "--format", "csv")
    assert code == 1
    assert [line.split(",")[1] for line in out.splitlines()[1:]] == ["True", "False", ""]
    assert fit("several.yaml", "--must-fit", "--where", "seq_len=64")[0] == 0


JOB = """torchrun pretrain_gpt.py --num-layers 2 --hidden-size 48 --num-attention-heads 4 \\
  --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --bf16 \\
  --vocab-size 96 --tokenizer-type NullTokenizer --transformer-impl local --train-iters 10 --lr 1e-4
"""


def test_the_script_of_a_job(fit: Run, card: Card) -> None:
    Path("train.sh").write_text(JOB)
    code, out, _ = fit("train.sh", "--cluster", card(100), "--gpus", "2", "--must-fit")
    assert (code, out.split(",")[0]) == (0, "fits: yes")
    assert "of the backend megatron" in out


def test_changes_of_a_job_are_told_in_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(JOB)
    found = subject([str(script)], Asked("dgx-h100", 2))
    (cell,) = found.cells
    assert found.job == "megatron"
    for settings, flags in (
        (
            {"model_options.recompute": "full"},
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        ),
        ({"training.distributed_optimizer": True}, "--use-distributed-optimizer"),
        ({"training.micro_batches": 1}, "--micro-batch-size 2"),
    ):
        proof = Proof(Change(settings, ""), changed(cell, settings), {}, True)
        assert str(_flags(Verdict(cell, {}), proof, Help(job=found.job))) == flags
    assert _flags(Verdict(cell, {}), proof, Help()) is None


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("llama3-80b",), "'llama3-80b' is no scenario, model or file; did you mean 'llama3-8b'?"),
        (("train.sh",), "'train.sh' is no scenario, model or file"),
        (("llama3-8b",), "llama3-8b is a model: give --cluster NAME and --seq-len N too"),
        (("llama3-8b", "--cluster", "dgx-h100"), "llama3-8b is a model: give --seq-len N too"),
        (("llama3-8b", "--cluster", "h100", "--seq-len", "8K"), "llama3-8b: cluster: unknown cluster 'h100'"),
        (("llama3-8b", "--cluster", "local", "--seq-len", "8K"), "cluster local has no memory limit"),
        (
            ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K", "--tp", "2"),
            "--tp 2: nothing divides a sample along tp; give --strategy megatron_sp or ",
        ),
        (
            ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K", "--gpus", "6", "--dp", "4"),
            "--gpus 6: not the ranks of dp 4",
        ),
        (
            ("llama3-8b", "--variant", "x", "--cluster", "dgx-h100", "--seq-len", "8K"),
            "--variant chooses among cells of a scenario",
        ),
        (("max_seqlen",), "searches for its seq_len: give one, --seq-len N"),
        (
            ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K", "--batch", "7", "--micro-batch", "2"),
            "--micro-batch 2: batch 7 over 1 replicas is no whole number of them",
        ),
        (
            ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K", "--set", "batch=8,batch=4"),
            "given twice",
        ),
    ],
)
def test_what_cannot_be_is_one_line(fit: Run, words: tuple[str, ...], problem: str) -> None:
    code, out, err = fit(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert problem in err


H100 = ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K")


@pytest.mark.parametrize(
    ("refused", "named", "mended"),
    [
        (("--tp", "2"), "--strategy megatron_sp", ("--tp", "2", "--strategy", "megatron_sp")),
        (("--sp", "4"), "--strategy ring_attention", ("--sp", "4", "--strategy", "ring_attention")),
        (
            ("--cp", "2"),
            "--strategy ulysses+ring_attention --sp N",
            ("--cp", "2", "--sp", "2", "--strategy", "ulysses+ring_attention"),
        ),
        (
            ("--tp", "2", "--strategy", "ulysses"),
            "--strategy megatron_sp",
            ("--tp", "2", "--strategy", "megatron_sp"),
        ),
        (("--gpus", "6", "--dp", "4"), "--gpus 6: not the ranks of dp 4", ("--gpus", "4", "--dp", "4")),
        (("--batch", "7", "--micro-batch", "2"), "use --batch 6", ("--batch", "6", "--micro-batch", "2")),
        (("--cluster", "local"), "name one that has by --cluster", ("--cluster", "l40s")),
        (("--set", "training.backend=zero4"), "'zero3'", ("--set", "training.backend=zero3")),
        (("--set", "model_options.recompute=ful"), "full", ("--set", "model_options.recompute=full")),
    ],
    ids=str,
)
def test_what_a_refusal_names_is_the_cause(
    refused: tuple[str, ...], named: str, mended: tuple[str, ...]
) -> None:
    """With what is named changed, and nothing else, there is a cell."""
    with pytest.raises(UserError) as error:
        asked_about(*H100, *refused)
    assert named in str(error.value)
    assert asked_about(*H100, *mended).cells


def asked_about(*words: str) -> Subject:
    """What the command line asks about, without a trace."""
    found: list[Subject] = []

    class Enough(Exception):
        pass

    def kept(words: Sequence[str], asked: Asked) -> Subject:
        found.append(subject(words, asked))
        raise Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "subject", kept)
        with suppress(Enough):
            command.main([*words], standalone_mode=False)
    return found[0]
