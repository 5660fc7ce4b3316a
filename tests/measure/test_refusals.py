"""What cannot be is refused in the words of refusals.yaml: in one line, where a user may have written it, and
of a file with its name first."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios import expand
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.tools.papers.answer import load_scenario
from tests.bench.fakes import SCENARIO
from tests.grid import data
from tests.measure.scenarios.test_scenario import RING, changed, scenario_of, write
from tests.measure.simulator.step_programs import cluster
from tests.measure.simulator.test_cost_forms import changed as changed_cluster


def scenario(folder: Path, path: str, value: Any) -> None:
    load_scenario(write(folder, changed(**{re.sub(r"\[(\d+)\]", r"__\1", path).replace(".", "__"): value})))


def config(folder: Path, text: str | None, fields: dict[str, Any]) -> None:
    (folder / "mine").mkdir()
    if text is not None:
        write(folder / "mine", text, "config.json")
    scenario_of(folder, [RING | {"model": "mine/config.json"} | fields])


def narrowing(folder: Path, asked: dict[str, Any]) -> None:
    Narrowing(**asked).cells(load_scenario(write(folder, SCENARIO)))


def own_cluster(folder: Path, part: str) -> None:
    """Values of a mapping are figures each; anything else is one figure."""
    keys, _, text = part.partition(": ")
    value = yaml.safe_load(text)
    each = (
        {key: {"value": one, "source": "mine"} for key, one in value.items()}
        if isinstance(value, dict)
        else {}
    )
    content: dict[str, Any] = each or {"value": value, "source": "mine"}
    for key in reversed(keys.split(".")):
        content = {key: content}
    load_cluster(
        write(folder, yaml.safe_dump({"extends": "h200-sxm", "about": "mine", **content}), "mine.yaml")
    )


def figures(folder: Path, values: dict[str, Any]) -> None:
    on = cluster()
    for path, value in values.items():
        on = changed_cluster(on, path, value)


#: by kind, what is asked of a folder and the fields of a row
KINDS: dict[str, Callable[..., object]] = {
    "scenarios": scenario,
    "texts": lambda folder, text: load_scenario(write(folder, text)),
    "groups": lambda folder, fields: scenario_of(folder, [RING | fields]),
    "configs": config,
    "narrowings": narrowing,
    "clusters": own_cluster,
    "figures": figures,
    "steps": lambda folder, options: TrainingOptions(**options),
}
REFUSALS = data(Path(__file__).with_name("refusals.yaml"))


@pytest.mark.parametrize(("kind", "row"), [(kind, row) for kind in KINDS for row in REFUSALS[kind]])
def test_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, row: list[Any]) -> None:
    monkeypatch.setattr(expand, "MOST_CELLS", 12)
    *asked, message = row
    with pytest.raises((UserError, ValueError)) as refused:
        KINDS[kind](tmp_path, *asked)
    said = str(refused.value)
    words = ".*".join(map(re.escape, message.removesuffix("$").split(".*")))
    assert re.search(words + "$" * message.endswith("$"), said), said
    if isinstance(refused.value, UserError):
        assert "\n" not in said
    if kind in ("scenarios", "texts", "groups", "configs", "clusters"):
        assert said.startswith(f"{tmp_path}/")
