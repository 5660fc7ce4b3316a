"""spbench verify: what it asks for, and how its verdicts are shown."""

import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from spbench.bench.command_line.drawn_tables import markdown
from spbench.bench.command_line.output import Output, View
from spbench.bench.measure.verify.cases import VerifyRow
from spbench.bench.tools.run.verify_output import _each, _output, _sections
from tests.terminal import faults_of, screen_of
from tests.tools.commands.conftest import Run


def row(status: Any, error: float | None, **further: Any) -> VerifyRow:
    rank, limit = (None, None) if error is None else (1, 1e-10)
    numbers: dict[str, Any] = {"error": error, "limit": limit, "rank": rank, "tensor": "weight"}
    cell: dict[str, Any] = {
        "strategy": "tensor_parallel",
        "model": "bert-tiny",
        "part": "bert",
        "size": 2,
        "mesh": "tp2",
    }
    return VerifyRow(**cell, dtype="fp64", batch=3, seq_len=24, status=status, **numbers, **further)


def test_verify(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    green = row("green", 1.5e-14)
    asked: list[Any] = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def found(*rows: VerifyRow) -> None:
        def verify(*arguments: Any, **options: Any) -> Iterator[VerifyRow]:
            options.pop("expect")(len(rows))
            asked.append((*arguments, options))
            return iter(rows)

        monkeypatch.setattr("spbench.bench.measure.verify_cases", verify)

    found(green, replace(green, status="unsupported", error=None, limit=None, rank=None))
    code, out, err = spbench(
        "verify", "--strategy", "tensor_parallel", "--world-size", "2", "--dtype", "fp64,fp32"
    )
    default = {"backend": "legacy_ddp", "device": "cpu", "options": {}, "backend_options": {}, "explain": 1}
    default["model_options"] = {}
    assert asked == [(["tensor_parallel"], None, [2], ["fp64", "fp32"], None, default)]
    assert (code, "1.5e-14" in out, out.splitlines()[-1]) == (0, True, "1 green, 1 unsupported")
    assert "tensor_parallel bert-tiny bert N=2 fp64: green" in err
    assert "| tensor_parallel | fp64  |     1 |           1 | 1.5e-14           | 1.0e-10 |" in out
    wrong = replace(green, status="RED", error=float("inf"), verdict="so many words " * 20)
    found(green, wrong, wrong)
    code, out, _ = spbench("verify")
    assert (code, out.count("(1)")) == (1, 5)  # like cases together, and each
    assert asked[-1] == (None, None, [1, 2, 3, 4], ["fp64"], None, default)
    assert spbench("verify", "--backend", "ddp")[0] == 1
    assert asked[-1][-1] == default | {"backend": "ddp"}
    settings = "model_options.dropout=0.5,strategy_options.pad_heads=true,training.optimizer=host"
    named = ("--model", "bert-tiny", "--strategy", "ulysses", "--backend", "zero1")
    assert spbench("verify", *named, "--set", settings)[0] == 1
    of_all = {"model_options": {"dropout": 0.5}, "options": {"pad_heads": True}}
    assert asked[-1][-1] == default | of_all | {"backend": "zero1", "backend_options": {"optimizer": "host"}}
    assert spbench("verify", "--pairs")[0] == 1
    assert {"megatron_sp+ulysses", "ulysses+ring_attention"} <= set(asked[-1][0])
    assert asked[-1][2] == [4]
    assert json.loads(spbench("verify", "--format", "json")[1])[1]["error"] is None
    found()
    assert spbench("verify")[1].splitlines()[-1] == "nothing to verify"


def test_a_pipe_has_the_whole_variant() -> None:
    variant = " ".join(f"option_{n}=value" for n in range(9))
    (table,) = _each([asdict(replace(row("green", 1e-14), variant=variant))])
    assert f"| {variant} |" in markdown(table)  # type: ignore[arg-type]


def test_a_terminal_shows_what_is_wrong_and_counts_the_rest() -> None:
    right = row("green", 1e-14)
    wrong = row("RED", 0.5, verdict="off by 5.0e-01, not a scale; wrong too: " + "output y, " * 20)
    refused = row("unsupported", None, reason="3 heads cannot be divided")
    rows = [asdict(each) for each in (*[right] * 40, wrong, refused)]
    shown = Output(_sections(rows), details=_each(rows))
    assert faults_of(shown, most_lines=26) == []
    text = screen_of(shown, 80)
    assert ("RED" in text, "off by 5.0e-01" in text, "cannot be divided" in text) == (True, True, False)
    assert "cannot be divided" in screen_of(shown, 80, View(details=True))
    alike = [asdict(replace(wrong, variant=f"option={n}", explanation="of the sum")) for n in range(12)]
    first = screen_of(_output([*rows, *alike], [], []), 80).splitlines()
    assert (first[0], len(first) < 30) == ("tensor_parallel wrong: 13 of 54 cases are RED", True)
    assert first[2].startswith("Where it goes wrong, tensor_parallel")
    refusals = [asdict(replace(refused, reason=f"reason {n % 5}")) for n in range(170)]
    whole = screen_of(_output(refusals, [], []), 80, View(details=True))
    assert ("(5) reason 4" in whole, len(whole.splitlines()) < 30) == (True, True)
    many = _output([asdict(replace(wrong, verdict=f"tensor {n} is off")) for n in range(9)], [], [])
    shorter, whole = (screen_of(many, 80, view) for view in (None, View(details=True)))
    assert [
        "(2) tensor 1 is off" in shorter,
        "tensor 2 is off" in shorter,
        "(9) tensor 8 is off" in whole,
    ] == [
        True,
        False,
        True,
    ]
