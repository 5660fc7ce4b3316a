"""Files of jobs with a mistake: one line says what, or another job is what they are.

SPBENCH_FUZZ is how many mistakes are made in each job; by default a few, so that it is quick.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFile
from tests.tools.jobs.job_inputs import GPUS, INPUTS, JOBS, job_of, read

MISTAKES = int(os.environ.get("SPBENCH_FUZZ", "15"))


def mutated(content: bytes, random: random.Random) -> bytes:
    """A file with one mistake."""
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    line = lines[place]
    words = [
        b"-1",
        b"0",
        b"10000000000000000000000",
        b'"8K"',
        b"null",
        b"1e400",
        b"[[",
        b"\xff",
        b"true",
        b"\x07",
    ]
    kind = random.randrange(6)
    if kind == 0:
        lines.insert(place, line)
    elif kind == 1:
        lines[place] = line.replace(b"e", b"", 1)
    elif kind == 2:
        head, mark, _ = line.replace(b"=", b":").partition(b":")
        lines[place] = head + (b" = " if b"=" in line else mark + b" ") + random.choice(words)
    elif kind == 3:
        del lines[place]
    elif kind == 4:
        lines[place] = line + random.choice(words)
    else:
        lines[place] = line[: random.randrange(len(line) + 1)]
    return b"\n".join(lines)


@pytest.mark.parametrize("name", JOBS)
def test_a_mistake_is_one_line_or_another_job(name: str) -> None:
    """Never a traceback; and what is still a job says so of every key."""
    kind, names = JOBS[name]
    dice = random.Random(7)
    for _ in range(MISTAKES):
        files = [JobFile(INPUTS / each, (INPUTS / each).read_bytes()) for each in names]
        place = dice.randrange(len(files))
        if files[place].path.name == "config.json":
            continue
        files[place] = JobFile(files[place].path, mutated(files[place].content, dice))
        job, problem = attempted(kind, files, GPUS.get(name, 8))
        if job is None:
            assert problem.isprintable()
        else:
            assert job.scenario_text().count("\n") > 10
            assert all(argument.detail or argument.outcome == "unknown" for argument in job.arguments)


def attempted(kind: str, files: Sequence[JobFile], gpus: int) -> tuple[Job | None, str]:
    """The job, or why there is none."""
    try:
        job = job_of(kind, files, gpus)
        job.cell()
    except UserError as error:
        return None, str(error)
    return job, ""


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
    made = read("torchtitan", ["llama3_8b.toml"], gpus=8)
    texts = _hostile(500)
    unknown = [Argument(f"--weird{n}", text, "unknown", "") for n, text in enumerate(texts)]
    sources = [replace(each, source=text) for each, text in zip(made.settings, texts[::-1], strict=False)]
    made = replace(
        made, arguments=unknown, settings=sources, remarks=texts, title=" ".join(texts), allow_unknown=True
    )
    text = made.scenario_text()
    assert all(re.match(r"# |title: |groups:$|  (- | +)\w+:", line) for line in text.splitlines())
    assert yaml.safe_load(text) == {"title": made.title, "groups": [made.content()]}
