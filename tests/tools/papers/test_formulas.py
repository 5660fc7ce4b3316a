"""Published formulas: what they may hold, and that no formula ends in anything but a number or a line."""

import time
from pathlib import Path

import pytest
import yaml

from spbench.bench.command_line.cli import exit_code
from spbench.bench.errors import UserError
from spbench.bench.tools.papers.answer import load_scenario
from spbench.bench.tools.papers.answers.expressions import evaluate

SIZES = {"B": 3, "L": 4096, "H": 1024, "N": 4}


def test_values() -> None:
    assert evaluate("2*(N-1)*B*L/N", SIZES) == 2 * 3 * 3 * 4096 / 4
    assert evaluate("H**2", SIZES) == 1024**2


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("L**H**H", "cannot evaluate the formula 'L**H**H'"),  # a whole number would take all memory and time
        ("10**10**10**10", "cannot evaluate the formula"),
        ("9e307*L*H", "gives inf; a finite number is needed"),
        ("9e307*L-9e307*L", "gives nan"),
        ("(1-L)**0.5", "a finite number is needed"),  # Python has a complex number for it
        ("L/(N-4)", "division"),
        ("L*", "invalid syntax"),
        ("L+K", "cannot evaluate 'K' in the formula"),
        ("__import__('os')", "it may hold numbers, + - * / ** and B, L, H, N"),
        ("+".join(["L"] * 20000), "cannot evaluate the formula"),
    ],
    ids=lambda text: text[:20],
)
def test_mistakes_are_user_errors_at_once(formula: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        evaluate(formula, SIZES)
    assert message in str(caught.value)
    assert time.monotonic() - start < 5


def written(folder: Path, formula: str, **changes: object) -> str:
    (folder / "f.csv").write_text(f"claim,published\nf,{formula}\n")
    claim = {
        "claim": "f",
        "published": {"file": "f.csv"},
        "cells": {"strategy": "ring_self_attention", "model_options": {"layers": 2}},
        "less": {"layers": 1},
        "phases": ["forward"],
    }
    content = {
        "title": "A formula",
        "defaults": {"model": "bert-tiny", "batch": 4, "seq_len": 512, "sizes": {"sp": 2}},
        "groups": [{"strategy": "ring_self_attention", "model_options": {"layers": n}} for n in (2, 1)],
        "formulas": [claim | changes],
    }
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_a_formula_that_overflows_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "L**H**H")
    assert exit_code(["run", "--scenario", path, "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "s.yaml: formulas[0].published: at bert-tiny/ring_self_attention/sp2/b4/L512" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("formula", "changes", "message"),
    [
        ("B*K", {}, "formulas[0].published: cannot evaluate 'K'"),
        ("B", {"claim": "g"}, "formulas[0].published: "),
        ("B", {"cells": {"strategy": "single"}}, "formulas[0]: no group declares a cell that it speaks of"),
        ("B", {"phases": ["forwards"]}, "formulas[0].phases[0]: must be 'forward'"),
    ],
)
def test_mistakes_name_the_key(
    tmp_path: Path, formula: str, changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError) as caught:
        load_scenario(written(tmp_path, formula, **changes))
    assert message in str(caught.value)


def test_a_search_has_no_sizes(tmp_path: Path) -> None:
    path = Path(written(tmp_path, "B"))
    content = yaml.safe_load(path.read_text())
    content["defaults"] |= {"batch": None, "search": {"quantity": "batch"}}
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(UserError, match=r"formulas\[0\]\.cells: bert-tiny/\S* searches"):
        load_scenario(str(path))
