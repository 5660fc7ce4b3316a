"""docs/megatron.md has every argument that `spbench import` maps, and options that exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from spbench.bench.cell import TrainingOptions
from spbench.bench.measure.scenarios.choices import option_mistakes
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.impls.models.model import models
from spbench.impls.registries import backends

ROOT = Path(__file__).parents[2]
ARGUMENTS = argument_table("megatron").arguments
PAGE = (ROOT / "docs" / "megatron.md").read_text()


def rows_of(section: str) -> list[list[str]]:
    """The cells of the table of a section, without its header."""
    lines = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0].splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")
    ]
    return cells[2:]


def test_every_mapped_argument_is_in_a_row() -> None:
    """Where a row's first column has the arguments."""
    told = set(re.findall(r"`(--[\w-]+)", "\n".join(re.findall(r"^\| (.*?) \|", PAGE, re.MULTILINE))))
    mapped = {known.name for known in ARGUMENTS.values() if known.outcome == "mapped"}
    assert mapped - told == set()
    assert told <= ARGUMENTS.keys()


@pytest.mark.parametrize(
    ("section", "of", "name"),
    [
        ("The model", "model_options", "gpt3-7b"),
        ("The optimizer and the backend", "training", "megatron"),
    ],
)
def test_every_option_exists(section: str, of: str, name: str) -> None:
    """The options of the table's second column, as `option: value` or alone."""
    found: dict[str, object] = {}
    for _, option, *_ in rows_of(section):
        for text in re.findall(r"`([^`]+)`", option):
            key, colon, value = text.partition(": ")
            if re.fullmatch(r"[a-z_]+", key) and key not in ("seq_len", "precision", "backend"):
                # a name alone, or a value that stands for a number, is given one that any option may have
                known = colon and re.fullmatch(r'[a-z"][\w:"-]*|\d+', value)
                found[key] = yaml.safe_load(value) if known else None
    assert len(found) >= 7
    options = models()[name] if of == "model_options" else backends()[name].options_type()
    own = {field.name for field in fields(options)}
    assert [key for key in found if key not in own | set(TrainingOptions.model_fields)] == []
    for key, value in found.items():
        if value is not None and key in own:
            # a mistake without a path is of options that go together
            assert [message for path, message in option_mistakes(of, name, {key: value}) if path] == []
