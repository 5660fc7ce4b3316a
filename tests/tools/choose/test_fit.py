"""`spbench fit`: its answer, its exit codes, and suggestions that hold when they are run by hand.

What a terminal shows of `spbench fit`: the verdict and the first change on a screen of 40 lines.
"""

import json
import pickle
import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch.cuda._memory_viz as viewer

from scripts.schemas import fit as fit_schema
from spbench.bench.cell import Cell
from spbench.bench.command_line import options
from spbench.bench.command_line.output import Output, View
from spbench.bench.command_line.progress import Progress
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.scenarios.scenario import changed, given
from spbench.bench.measurement import Measurement
from spbench.bench.tools.choose import fitting as module
from spbench.bench.tools.choose import suggestions
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.fit_command import command
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.fitting import Fitting, _help, flags_of
from spbench.bench.tools.choose.proofs import Proofs
from spbench.bench.tools.choose.subject import Subject, subject
from spbench.bench.tools.choose.suggestions import Change, single_changes
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.slow import slow
from tests.terminal import faults_of, screen_of
from tests.tools.choose.questions import small_cards
from tests.tools.commands.conftest import Run

#: needs some 50 MiB at 1,024 positions, and 190 at 4,096
TINY = ("causal-transformer-tiny", "--gpus", "2", "--batch", "8", "--set", "model_options.layers=6")
Card = Callable[[int], str]


def shorter(card: str) -> tuple[str, ...]:
    return (*TINY, "--cluster", card, "--seq-len", "1K")


def longer(card: str) -> tuple[str, ...]:
    return (*TINY, "--cluster", card, "--seq-len", "4K")


def test_what_is_said_of_a_step_is_compared_with_the_peak_and_refuses_nothing(fit: Run) -> None:
    code, out, _ = fit(*shorter("dgx-h100"), "--measured", "9 s,200% MFU", "--must-fit", "--format", "json")
    answer = json.loads(out)
    slow_step, fast = answer["measured"]
    assert (code, answer["fits"]) == (0, True)
    assert (slow_step["possible"], fast["possible"]) == (True, False)
    assert fast["step_time_s"] < fast["least_step_time_s"] == slow_step["least_step_time_s"] < 9


def test_the_first_lines_say_yes_and_by_how_much(fit: Run, card: Card) -> None:
    code, out, _ = fit(*shorter(card(100)), "--must-fit")
    assert code == 0
    first, second, third, _, model, fifth, *_ = out.splitlines()
    shown = re.fullmatch(r"fits: yes, (\S+) GiB to spare \(needs (\S+) of (\S+) GiB\)", first)
    assert shown is not None
    spare, needed, has = map(float, shown.groups())
    assert spare == pytest.approx(has - needed, abs=1e-3)
    assert second.startswith("on the fullest, ranks 0-1 (step 2, backward, in the head and the loss): ")
    assert re.search(
        r": activations of blocks\.\*\.mixer [\d.]+, activations of blocks\.\*\.mlp [\d.]+ GiB$", second
    )
    assert third == "no change is needed; --suggest tries those that take less memory"
    assert model == "the model causal-transformer-tiny: 148,080 parameters, 6 layers"
    assert fifth == (
        "taken where nothing was said: micro-batch 4 (--micro-batch), strategy single (--strategy), kernel "
        "flash (--set model_options.attention), precision bf16 (--set precision), backend zero3 "
        "(--set training.backend); tokens of a micro-batch on a rank: 4096"
    )
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


def test_the_answer_for_programs_a_figure_and_a_snapshot(fit: Run, card: Card) -> None:
    files = ("--figure", "new/m.png", "--snapshot", "m.pickle")
    code, out, _ = fit(*shorter(card(100)), *files, "--format", "json")
    content = json.loads(out)
    assert code == 0
    jsonschema.validate(content, fit_schema())
    assert {"largest", "errors"} <= content.keys()
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
    assert Path("new/m.png").read_bytes().startswith(b"\x89PNG")
    snapshot = pickle.loads(Path("m.pickle").read_bytes())
    assert sum(each["total_size"] for each in snapshot["segments"]) == line["reserved_memory_bytes"]
    assert "segments: " in viewer.segsum(snapshot)  # which checks that sizes add up
    viewer.trace_plot(snapshot)


def run(cluster: str, settings: dict[str, Any]) -> Measurement:
    """The cell of :func:`longer` with other settings, measured by itself."""
    fields = {
        "training": {"backend": "zero3", "moments": "later", "steps": 2},
        "model_options": {"layers": 6},
    }
    cell = make_cell("causal-transformer-tiny", "single", {"dp": 2}, 8, 4096, cluster=cluster, **fields)
    return VirtualEngine().measure(changed(cell, settings))


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_a_job_that_does_not_fit_gets_changes_that_hold(
    fit: Run, every: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    if not every:
        request.getfixturevalue("few_changes")
    cluster = small_cards(tmp_path, 100)
    code, out, _ = fit(*longer(cluster), "--suggest", "--must-fit", "--format", "json")
    assert code == 1
    content = json.loads(out)
    assert content["fits"] is False
    found = content["suggestions"]["found"]
    assert {"model_options.recompute=full", "training.micro_batches=4"} <= {each["set"] for each in found}
    assert [each["other_job"] for each in found] == sorted(each["other_job"] for each in found)
    for number, each in enumerate(found):
        made = run(cluster, dict(given([tuple(pair.split("=")) for pair in each["set"].split(",")])))
        assert made.status == "ok"
        assert (each["step_time_s"], each["peak_memory_bytes"]) == (made.step_time_s, made.peak_memory_bytes)
        assert each["spare_bytes"] == each["card_bytes"] - each["total_bytes"] >= 0
        if every or not number:  # asked again
            again = fit(*longer(cluster), "--set", each["set"], "--must-fit", "--format", "json")[1]
            assert json.loads(again)["cells"][0]["total_bytes"] == each["total_bytes"]
    (cell,) = content["cells"]
    assert cell["spare_bytes"] == cell["card_bytes"] - cell["total_bytes"] < 0
    # the command line that looks for another layout asks about the same
    assert shlex.split(content["suggestions"]["advise"]) == [
        *("spbench", "advise", "--model", "causal-transformer-tiny", "--cluster", cluster),
        *("--gpus", "2", "--seq-len", "4096", "--batch", "8", "--set", "model_options.layers=6"),
    ]


@pytest.mark.slow
def test_each_change_is_there_as_it_is_typed_with_its_price_in_time(
    fit: Run, few_changes: None, tmp_path: Path
) -> None:
    code, out, _ = fit(*longer(small_cards(tmp_path, 100)))
    assert code == 0
    verdict, _, change = out.splitlines()[:3]
    assert verdict.startswith("fits: no, 0.114 GiB are missing (needs 0.222 of 0.107 GiB)")
    assert change.startswith("makes it fit: --set model_options.recompute=full (0.00586 GiB to spare, step +")
    (line,) = (line for line in out.splitlines() if line.startswith("| model_options.recompute=full "))
    # timed on a card with room for both
    times = [run("dgx-a100", settings).step_time_s for settings in ({}, {"model_options.recompute": "full"})]
    now, again = (seconds or 0.0 for seconds in times)
    assert again > 1.1 * now > 0
    assert f" {again / now - 1:+.0%} |" in line


@pytest.mark.slow
def test_where_nothing_helps_the_nearest_is_named(fit: Run, card: Card, few_changes: None) -> None:
    code, out, _ = fit(*longer(card(4)), "--must-fit")
    assert code == 1
    assert re.search(r"^no change makes it fit: \d+ single ones and \d+ pairs of them tried$", out, re.M)
    assert "the closest change, --set " in out


@pytest.mark.parametrize(
    ("ratio", "shown"), [(None, None), (1.0061, "+0.6%"), (0.9999, "+0.0%"), (1.298, "+30%")]
)
def test_a_price_in_time_has_the_digits_that_tell(ratio: float | None, shown: str | None) -> None:
    cell = Cell(model="causal-transformer-tiny", strategy="single", batch=2, seq_len=64, cluster="l40s")
    measured = {"peak_memory_bytes": 2**30, "usable_memory_bytes": 2**29, "by_class": [], "status": "oom"}
    before = Verdict(cell, {**measured, "step_time_s": 1.0})
    near = Verdict(cell, {**measured, "step_time_s": ratio}, Change({"batch": 2}, ""))
    said, _ = _help(Fitting(Subject([cell]), [before], proofs=Proofs([], 1, near)))
    assert isinstance(said, str)
    assert said.startswith("the closest change, --set batch=2, needs 1.00 GiB")
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


SEVERAL = data(__file__)["SEVERAL"]


@pytest.mark.slow
def test_several_cells_have_a_line_each(fit: Run, card: Card, few_changes: None) -> None:
    Path("several.yaml").write_text(SEVERAL.replace("CARD", card(20)))
    code, out, _ = fit("several.yaml", "--must-fit", "--format", "csv")
    assert code == 1
    assert [line.split(",")[1] for line in out.splitlines()[1:]] == ["True", "False", ""]
    assert fit("several.yaml", "--must-fit", "--where", "seq_len=64")[0] == 0


def test_the_fullest_is_one_that_does_not_fit() -> None:
    """Also where that is for its host, and its cards have more room than those of others."""
    cell = Cell(model="causal-transformer-tiny", strategy="single", batch=2, seq_len=64, cluster="l40s")
    measured = {"usable_memory_bytes": 2**35, "by_class": []}
    fits = Verdict(cell, {**measured, "peak_memory_bytes": 2**34, "status": "ok"})
    on_host = Verdict(cell, {**measured, "peak_memory_bytes": 2**33, "status": "oom"})
    several = Fitting(Subject([cell]), [fits, on_host])
    assert several.fullest is on_host
    assert not several.fits


JOB = """torchrun pretrain_gpt.py --num-layers 2 --hidden-size 48 --num-attention-heads 4 \\
  --seq-length 64 --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 4 --bf16 \\
  --vocab-size 96 --tokenizer-type NullTokenizer --transformer-impl local --train-iters 10 --lr 1e-4
"""


def test_the_script_of_a_job(fit: Run, card: Card) -> None:
    Path("train.sh").write_text(JOB)
    code, out, _ = fit("train.sh", "--cluster", card(100), "--gpus", "2", "--must-fit")
    assert (code, out.split(",")[0]) == (0, "fits: yes")
    assert "output_layer and the loss" in out.splitlines()[1]
    assert "tokens of a micro-batch on a rank: 64" in out.splitlines()[5]
    assert "of the backend megatron" in out


def test_changes_of_a_job_are_told_in_its_own_arguments(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(JOB)
    about = subject([str(script)], Asked("dgx-h100", 2))
    (cell,) = about.cells
    assert about.job == "megatron"
    measured: dict[str, Any] = {
        "by_class": [],
        "status": "ok",
        "usable_memory_bytes": 1,
        "peak_memory_bytes": 1,
    }
    answer = Fitting(about, [Verdict(cell, measured)])
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    for settings, flags in (
        ({"model_options.recompute": "full"}, recompute),
        ({"training.distributed_optimizer": True}, "--use-distributed-optimizer"),
        ({"training.micro_batches": 1}, "--micro-batch-size 2"),
    ):
        verdict = Verdict(changed(cell, settings), measured, Change(settings, ""))
        assert flags_of(answer, verdict) == flags
    assert flags_of(Fitting(Subject([cell]), answer.verdicts), verdict) == ""


@tabled(__file__, "what_cannot_be_is_one_line_that_names_the_cause")
def test_what_cannot_be_is_one_line_that_names_the_cause(
    fit: Run, words: tuple[str, ...], problem: str, mended: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what is named changed, and nothing else, there is a cell."""
    code, out, err = fit(*words)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert problem in err
    question = ("llama3-8b", "--cluster", "dgx-h100", "--seq-len", "8K", *mended)
    assert asked_about(question, monkeypatch).cells


def asked_about(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> Subject:
    """What the command line asks about, without a trace."""
    about: list[Subject] = []

    def kept(words: Sequence[str], asked: Asked) -> Subject:
        about.append(subject(words, asked))
        raise UserError("enough")

    monkeypatch.setattr(module, "subject", kept)
    with suppress(UserError):
        command.main([*words], standalone_mode=False)
    return about[0]


MOST_LINES = 40


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of the commands that are run, which are not printed."""
    found: list[Output] = []
    forms = SimpleNamespace(load=lambda form: lambda output, out, err: found.append(output))
    monkeypatch.setattr(options, "FORMS", forms)
    return found


def test_the_verdict_comes_before_changes_are_tried(
    fit: Run,
    card: Callable[[int], str],
    shown: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recomputed(cell: Cell) -> list[Change]:
        return [each for each in single_changes(cell) if {*each.settings} == {"model_options.recompute"}]

    monkeypatch.setattr(suggestions, "single_changes", recomputed)
    said: list[str] = []
    monkeypatch.setattr(Progress, "keep", lambda self, text: said.append(text))
    monkeypatch.setattr(Progress, "at", lambda self, text, share: said.append(text))
    two_layers = (*TINY[:-1], "model_options.layers=2", "--cluster", card(10), "--seq-len", "1K")
    assert fit(*two_layers)[0] == 0
    verdict = "\n".join(str(shown[0].sections[0]).splitlines()[:2])
    assert verdict.startswith("fits: no")
    assert any("recompute" in text for text in said[said.index(verdict) :])
    assert not any("recompute" in text for text in said[: said.index(verdict)])


@pytest.mark.parametrize(
    ("mib", "more"),
    [
        slow(100, ("--seq-len", "4K")),
        (400, ("--seq-len", "1K", "--pp", "2", "--micro-batch", "1")),
    ],
)
def test_an_answer_fits_a_screen(
    fit: Run,
    card: Callable[[int], str],
    few_changes: None,
    shown: list[Output],
    mib: int,
    more: tuple[str, ...],
) -> None:
    assert fit(*TINY, "--cluster", card(mib), *more)[0] == 0
    (output,) = shown
    assert faults_of(output, MOST_LINES) == []
    assert faults_of(output, view=View(wide=True, details=True)) == []
    screen = screen_of(output, 80)
    assert screen.startswith("fits: ")
    assert "--details shows: " in screen
    assert "Memory of each rank class at each step, of" in screen
    assert "Memory of each rank class" in screen_of(output, 80, View(details=True))
