"""What exports, the gate and histories print of made-up results."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.grid import data
from tests.tools.changes.records import MACHINE, OTHER, Cell, cell, commit, nightly
from tests.tools.changes.rows import CLAIM, ENTRY, EVERYTHING, TABLE, folder, made_up, one_byte_more
from tests.tools.commands.conftest import Run
from tests.tools.texts import hold

TEXTS = Path(__file__).with_name("texts")

COMMANDS = data(__file__)["COMMANDS"]


def night(number: int, generator: random.Random) -> Sequence[Cell]:
    """The fifth sends a byte more, the fourth is longer; from the sixth on a timed cell is slower."""
    timed = [0.1 * (1.5 if number >= 6 else 1) * (1 + 0.001 * place) for place in range(5)]
    return [
        cell("m/lasp/sp4/b1/L2/virtual", sent_bytes=2**30 + (number >= 4), step_time_s=2.0 + (number == 3)),
        cell("m/dsp/sp4/b1/L2/virtual", "oom" if number == 2 else "ok", sent_bytes=64),
        cell("m/dsp/sp4/b1/L2/distributed", exact=False, step_time_s=timed),
    ][: 2 if number == 1 else 3]


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working folder of the commands: results with one of every change, another baseline, nights."""
    monkeypatch.chdir(tmp_path)
    old = [*copy.deepcopy(EVERYTHING), made_up("i/slower"), made_up("gone"), made_up("j|k", "ok")]
    new = [*copy.deepcopy(old[:-2]), made_up("j|k", "failed"), made_up('new "50%",\n:\\')]
    one_byte_more(new)
    new[0]["measurement"]["step_time_s"] = 0.2
    new[1] |= {"status": "oom", "reason": "no room"}
    new[2]["measurement"]["answer"] = 2048
    new[3]["measurement"]["peak_memory_bytes"] += 2**30
    new[7]["measurement"] |= {"step_time_s": 0.26, "rates": "sourced", "bound": "matmul"}
    new[8]["reason"] = "x < y & z | 50%"
    worse = replace(CLAIM, reproduced=2.4, relative_error=0.2)
    folder(Path("old"), old, CLAIM, ENTRY, TABLE)
    folder(Path("new"), new, worse, ENTRY, replace(TABLE, status_reproduced="ok"))
    folder(Path("previous"), [*old[1:], made_up("a/exact", peak_memory_bytes=10**9)], CLAIM, ENTRY, TABLE)
    nightly(Path("nights"), 12, night, (MACHINE, OTHER))
    Path("nights/meant.yaml").write_text(
        f"meant: [{{commit: '{commit(3).short}', reason: more is computed}}]"
    )
    Path("nights/targets.yaml").write_text(
        "targets: [{metric: step_time_s, cell: m/lasp, value: 1.5}, {metric: sent_bytes, value: 1e8}]"
    )


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.usefixtures("places")
def test_the_text_is_the_one_that_was_read(name: str, command_line: Run) -> None:
    code, out, err = command_line(*COMMANDS[name].split())
    files = [f"-- {path.name}\n{path.read_text()}" for path in sorted(Path().glob("out/*"))]
    text = "".join([f"exit code {code}\n", out, *files, f"-- standard error\n{err}" if err else ""])
    hold(TEXTS / name, text)


def test_every_text_is_of_a_command() -> None:
    assert {path.name for path in TEXTS.iterdir()} == {*COMMANDS}
