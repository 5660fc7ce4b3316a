"""Jobs whose files are changed in one place: the settings that they make, or why they are refused.

Damaged files of jobs: one line says what is wrong, or they are a scenario; never a traceback.

SPBENCH_FUZZ is how many of each kind are tried; a few by default, so that the default tests stay quick.
"""

import os
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.step_times import utilization
from spbench.bench.measure.scenarios.expand import expand
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import MOST_NAMED, Argument, Job, beside_peak
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.shell_syntax import unknown_in
from spbench.bench.yaml_files import parse_yaml, read_yaml
from tests.cells import make_cell
from tests.tools.jobs.job_inputs import GIVEN, GPUS, INPUTS, JOBS, READERS, data, job_of, read

CASES = read_yaml(INPUTS.with_name("cases") / "test_cases.yaml")
#: by what a row must have one: a row without any would hold nothing
EXPECTED = {"settings", "without", "refused"}


def job_of_row(row: Mapping[str, Any]) -> Job:
    kind, names = JOBS[row["job"]] if "job" in row else (row["kind"], [row["file"]])
    texts = {name: row["text"] if "text" in row else (INPUTS / name).read_text() for name in names}
    for old, new in row.get("changes", ()):
        name = next(name for name in names if old in texts[name])
        texts[name] = texts[name].replace(old, new, 1)
    gpus = row.get("gpus", GPUS.get(row.get("job", ""), 8))
    return job_of(kind, [JobFile(INPUTS / name, text.encode()) for name, text in texts.items()], gpus)


@pytest.mark.parametrize(
    ("strict", "row"), [(kind == "strict", row) for kind in ("strict", "lenient") for row in CASES[kind]]
)
def test_a_job_is_what_its_files_say(strict: bool, row: Mapping[str, Any]) -> None:
    assert EXPECTED & row.keys()
    if "refused" in row:
        with pytest.raises(UserError, match=row["refused"]):
            replace(job_of_row(row), strict=strict).cell()
        return
    job = replace(job_of_row(row), strict=strict)
    cell, made = job.cell(), {setting.path: setting.value for setting in job.settings}
    assert made | row.get("settings", {}) == made
    assert not {*row.get("without", "").split()} & made.keys()
    assert row.get("program", "") in job.program
    assert row.get("trains", cell.program) == cell.program
    assert all(any(text in each for each in job.warnings) for text in row.get("warns", ()))
    assert any(row.get("approximated", "") in each.detail for each in job.arguments)
    outcomes = {each.name: [each.outcome, each.missing] for each in job.arguments}
    assert outcomes | row.get("arguments", {}) == outcomes


#: NeMo-RL's issue 1275: its posters' times of a step of Qwen3-8B whose sequences have 128K tokens at the most
RL = {"dp": 8, "sp": 8, "tp": 4}, 2048, 131072, "bf16"


@pytest.mark.parametrize(
    ("cluster", "said", "tflops"), [("dgx-h100", "104.72 s", 1616), ("dgx-a100", "393270 ms", 430)]
)
def test_a_time_that_the_cards_cannot_reach_is_impossible(cluster: str, said: str, tflops: float) -> None:
    cell = make_cell("Qwen/Qwen3-8B", "megatron_sp+ring_attention", *RL, cluster=cluster)
    (record,) = beside_peak(cell, [said])
    assert not record["possible"]
    assert record["model_flops_per_s_of_a_gpu"] == pytest.approx(tflops * 1e12, rel=0.02)
    assert "131072 is only the longest length" in record["words"]
    # so many tokens take exactly that time at the peak
    shorter = cell.model_copy(update={"seq_len": round(record["most_tokens"] / 2048)})
    assert utilization(shorter, record["step_time_s"]) == pytest.approx(1.0, rel=1e-3)


def test_a_rate_that_contradicts_the_time_has_its_cause() -> None:
    whole = make_cell("Qwen/Qwen3-8B", "megatron_sp+ring_attention", *RL, cluster="dgx-h100")
    window = changed(whole, {"model_options.window": 4096})
    mfu = utilization(window, 300.0) or 0.0
    rates = [f"{100 * of:.4f}% MFU" for of in (mfu, mfu / 8, utilization(whole, 300.0) or 0.0)]
    of_time, right, divided, counted = (each["words"] for each in beside_peak(window, ["300 s", *rates]))
    assert "300 s: possible" in of_time
    assert "so the program" not in right
    assert "so the program divides by the 8 ranks of a sequence" in divided
    assert "so the program counts windows and documents as whole sequences" in counted


EXAMPLES = int(os.environ.get("SPBENCH_FUZZ", "15"))
SCRIPT = data(__file__)["SCRIPT"]
TEST = data(__file__)["TEST"]
#: by name: the program, and the texts of its files
WHOLE: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "a script": ("megatron", {"train.sh": SCRIPT}),
    "a functional test": ("megatron", {"config.yaml": TEST}),
    **{
        name: (kind, {each: (INPUTS / each).read_text() for each in names})
        for name, (kind, names) in JOBS.items()
    },
}
NASTY = [
    *("0", "-1", "1", "3", "4k", "1e3", "1_0", "9" * 30, "inf", "nan", "true", "''", "é", "\x00", "2**40"),
    *("$", "${", "$(", "`", "'", '"', "(", ")", "\\", "&&", ";", "|", "#", "<<EOF", "${A:-${B}}", "$((1/0))"),
    *("--", "--x", "--bf16", "--num-experts 4", "--hidden-size 64", "if true; then", "done", "ARGS+=(--x)"),
    *("10000000000000000000000", '"8K"', "null", "1e400", "[[", "\x07", "}", "= 1", ": 1"),
]
WORDS = [*NASTY, *sorted(argument_table("megatron").arguments)]


@st.composite
def damaged(draw: Any, name: str) -> tuple[str, list[JobFile]]:
    """The program and the files, one of which has words or lines left out, put in, doubled or exchanged, or a
    byte changed."""
    kind, texts = WHOLE[name]
    which = draw(st.sampled_from([each for each in texts if each != "config.json"]))
    text = texts[which]
    for _ in range(draw(st.integers(1, 3))):
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        words = lines[at].split(" ")
        word = draw(st.integers(0, len(words) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                del words[word]
            case 1:
                words.insert(word, draw(st.sampled_from(WORDS)))
            case 2:
                words[word] = draw(st.sampled_from(WORDS))
            case 3:
                words.append(words[word])
            case 4:
                words = [*words, "\n", *draw(st.sampled_from(lines)).split(" ")]
            case 5:
                words = []
        lines[at] = " ".join(words)
        text = "\n".join(lines)
    content = text.encode()
    if content and draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(content) - 1))
        content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    contents = {each: text.encode() for each, text in texts.items()} | {which: content}
    return kind, [JobFile(INPUTS / each, content) for each, content in contents.items()]


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_job_is_one_line_or_a_scenario(name: str) -> None:
    """A scenario is read again as the same cell, and every argument has an outcome."""

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(damaged(name))
    def check(job_files: tuple[str, list[JobFile]]) -> None:
        kind, files = job_files
        try:
            job = READERS[kind](JobFiles(files, 16, "dgx-a100", GIVEN.get(kind, {})))
            text = job.scenario_text() if job is not None else ""
        except UserError as error:
            message = str(error)
            assert "\n" not in message, message
            assert message.isprintable() or kind == "megatron", message
            assert not unknown_in(message), "a mark is shown"
            return
        if job is not None:
            (group,) = parse_yaml(Path("job.yaml"), text.encode())["groups"]
            (cell,) = expand({}, [group], {}, "", Path())
            assert cell == job.cell()
            assert cell.sizes.world == 16
            assert all(each.outcome != "refused" for each in job.arguments)
            # nothing is left out in silence
            warned = " ".join(job.warnings)
            left_out = [each.name for each in job.of("unknown")][:MOST_NAMED]
            assert all(name[:70] in warned for name in left_out)
            assert all(each.detail in warned for each in job.arguments if each.missing)

    check()


@pytest.mark.parametrize("name", ["a script", "a functional test"])
def test_as_they_are_they_are_scenarios(name: str) -> None:
    kind, texts = WHOLE[name]
    job = READERS[kind](JobFiles([JobFile(Path(n), t.encode()) for n, t in texts.items()], 16, "dgx-a100"))
    assert job is not None
    assert job.cell().sizes.world == 16


def _hostile(count: int) -> list[str]:
    """Texts that would leave a comment or a scalar of YAML, were they written as they are."""
    dice = random.Random(11)
    breaks = ["\n", "\r", "\r\n", "\x85", "\u2028", "\u2029", "\x0b", "\x00", "\x1b", "\ufeff", "\ud800"]
    settings = ["variants: {a: {batch: 4}}", "groups: []", "title: x", "- model: bert-tiny", "&a", "}"]
    marks = ["#", "'", '"', "\\", "\t", ": ", " #", "%", "...", "---", "*a", "!!str", "{", "[", "é", "😀"]
    pieces = [*breaks, *settings, *marks]
    return ["z" + "".join(dice.choices(pieces, k=dice.randint(1, 6))) for _ in range(count)]


def test_no_text_of_a_job_writes_settings() -> None:
    """Unknown arguments, sources, remarks and titles stay comments and one scalar."""
    job = read("torchtitan", ["llama3_8b.toml"], gpus=8)
    texts = _hostile(500)
    unknown = [Argument(f"--weird{n}", text, "unknown", "") for n, text in enumerate(texts)]
    sources = [replace(each, source=text) for each, text in zip(job.settings, texts[::-1], strict=False)]
    title = " ".join(texts)
    job = replace(job, arguments=unknown, settings=sources, remarks=texts, title=title, strict=False)
    text = job.scenario_text()
    assert all(re.match(r"# |title: |groups:$|  (- | +)\w+:", line) for line in text.splitlines())
    assert yaml.safe_load(text) == {"title": job.title, "groups": [job.content()]}
