"""The pages of docs that are made from code and data: what can be run, arguments of programs, commands.

    python scripts/reference_pages.py           # write the pages
    python scripts/reference_pages.py --check   # exit code 1 if a page is not current

A page begins with a line that names this script, so that the page's words count as code and not as prose.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from spbench.bench.cell import Cell
from spbench.bench.command_line.cli import COMMANDS
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, load_cluster
from spbench.bench.measure.engines.plan import plan
from spbench.bench.tools.jobs import JOBS
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table
from spbench.bench.tools.run.kinds_of_work import without_own_rates
from spbench.bench.units import six_digits
from spbench.bench.yaml_files import packaged, read_yaml
from spbench.impls.layout import Unsupported
from spbench.impls.registries import all_models, all_strategies

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
MARK = "<!-- scripts/reference_pages.py writes this page -->\n\n"

#: the columns of the matrix: a cell's settings, in addition to the strategy and two ranks along its axis
FEATURES: Mapping[str, Mapping[str, Any]] = {
    "GQA": {"model": "causal-transformer-tiny-gqa"},
    "MLA": {"model": "mla-tiny"},
    "indexer": {"model": "indexer-tiny"},
    "experts": {"model": "moe-tiny", "ep": 2},
    "windows": {"model_options": {"window": 16}},
    "packed": {"model_options": {"documents": [20, 44]}},
    "dropout of causal attention": {"model_options": {"attention_dropout": 0.1}},
    "padding mask (BERT)": {"model": "bert-tiny"},
    "linear attention": {"model": "linear-transformer-tiny"},
    "gated recurrences": {"model": "gated-deltanet-tiny"},
    "hybrids": {"model": "hybrid-tiny"},
    "grids": {"model": "st-dit-tiny"},
    "pipeline": {"pp": 2, "training": {"micro_batches": 2}},
    "in `tensor_parallel`": {"around": "tensor_parallel+", "tp": 2},
    "in `ulysses`": {"around": "ulysses+", "cp": 2},
}
#: by site that a strategy meets, the model of features that name no model
MODELS = {
    "causal_attention": "causal-transformer-tiny",
    "attention": "bert-tiny",
    "linear_attention": "linear-transformer-tiny",
    "full_attention": "st-dit-tiny",
    "indexed_attention": "indexer-tiny",
}
#: programs with a table of arguments
PROGRAMS = (
    *("megatron", "torchtitan", "deepspeed", "axolotl", "llama_factory", "swift", "verl", "automodel"),
    *("veomni", "arctic", "bridge"),
)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The Markdown of a table."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# -- what can be run -----------------------------------------------------------------------------------------


def runs(strategy: str, feature: Mapping[str, Any]) -> str:
    """The matrix's cell of a strategy and a feature: "yes" if the check of every run accepts both on two
    ranks, "-" if the strategy cannot be within itself, else ""."""
    around = feature.get("around", "")
    own = all_strategies()[strategy].axes
    inner = "cp" if around == "ulysses+" else own[0] if own else "dp"
    sizes = {name: feature[name] for name in ("pp", "ep", "tp") if name in feature} | {inner: 2}
    sizes |= {"sp": 2} if around == "ulysses+" else {}
    if around and strategy in ("single", around.removesuffix("+")):
        return "-"
    given = {key: feature[key] for key in ("model_options", "training") if key in feature}
    meets = all_strategies()[strategy].meets
    model = feature.get("model") or next(own for site, own in MODELS.items() if site in meets)
    if strategy == "lasp2h" and "model" not in feature:
        model = "hybrid-tiny"
    try:
        plan(Cell(model=model, strategy=f"{around}{strategy}", sizes=sizes, seq_len=144, batch=4, **given))
    except (Unsupported, UserError, KeyError, ValueError):  # no such option of the model; no such nesting
        return ""
    return "yes"


def matrix() -> str:
    rows = [[f"`{name}`", *(runs(name, each) for each in FEATURES.values())] for name in all_strategies()]
    return table(["strategy", *FEATURES], rows)


def _number(sourced: Any, scale: float, unit: str) -> str:
    value = sourced and sourced.value
    return "" if value is None else f"{six_digits(round(value / scale, 1))} {unit}"


def _cluster(name: str, cluster: Cluster) -> list[str]:
    device, about = cluster.device, without_own_rates(cluster)
    link, net = cluster.node_link, cluster.network
    peak = device.peak_flops_per_s.get("fp16") or device.peak_flops_per_s.get("bf16")
    return [
        f"`{name}`",
        f"{cluster.devices_per_node} x {device.name}",
        _number(device.memory_total_bytes, 2**30, "GiB"),
        _number(peak, 1e12, "TFLOP/s"),
        _number(link and link.bandwidth_bytes_per_s, 1e9, "GB/s"),
        f"{net.nics_per_node} x {_number(net.bandwidth_bytes_per_s, 1e9, 'GB/s')}" if net else "",
        ", ".join(about) or "nothing",
    ]


def clusters() -> str:
    heads = (
        "cluster",
        "a node",
        "memory",
        "half precision",
        "intra-node link",
        "network",
        "without rates of",
    )
    return table(
        heads, [_cluster(name, load_cluster(name)) for name in packaged("spbench.scenarios.clusters")]
    )


def presets() -> str:
    """The Markdown of the table of presets: each kind of model with its presets' names."""
    by_class = defaultdict[str, list[str]](list)
    for name, model in all_models().items():
        by_class[type(model).__name__].append(f"`{name}`")
    return table(["kind of model", "presets"], ([kind, ", ".join(names)] for kind, names in by_class.items()))


def support_page() -> str:
    return f"""{MARK}# What can be run: strategies, clusters, models

This page lists which strategy runs which kind of model, what the packaged clusters have, and the presets of
models. It is written from the code and the files.
`spbench list` shows the same for your installation.

## Strategies and what they take

*yes* means that the strategy can run a small model of this kind on two ranks along its axis. An empty field
means that it refuses, with a reason. A dash means that there is nothing to combine.

{matrix()}
## Packaged clusters

The last column names the work for which nobody measured a rate on this card or network. Times of such work
are less sure ([accuracy](../trust.md#time)).

{clusters()}
## Models

Any `config.json` of [these families](../add_model.md#a-model-from-a-configjson) is a model too.

{presets()}"""


# -- arguments of other programs -----------------------------------------------------------------------------


def _of_program(of: ArgumentTable) -> Iterator[str]:
    yield f"## {of.program}\n"
    arguments = [*{each.name: each for each in of.arguments.values()}.values()]
    rows = []
    for argument in arguments:
        if argument.name in of.settings:
            said = of.settings[argument.name]
            values = "; ".join(f"`{theirs}`: `{ours}`" for theirs, ours in said.values)
            rows.append([f"`{argument.name}`", f"`{said.path}`", values.lower() if said.values else ""])
    if rows:
        yield table(["argument", "setting", "values"], rows)
    groups = defaultdict[tuple[str, str], list[str]](list)
    for argument in arguments:
        if argument.outcome != "no effect" and argument.name not in of.settings:
            why = "read together with others" if argument.outcome == "mapped" else argument.detail
            groups[argument.outcome, why].append(f"`{argument.name}`")
    yield table(
        ["outcome", "why", "arguments"],
        ([outcome, why.replace("|", "or"), " ".join(names)] for (outcome, why), names in groups.items()),
    )


def kinds() -> str:
    """A table of the kinds of job files, with the files and the programs' versions."""
    rows = []
    for name, about in JOBS.summaries().items():
        path = ROOT / "bench" / "tools" / "jobs" / f"{name}.yaml"
        content = read_yaml(path) if path.exists() else {}
        programs = [content["program"]] if "program" in content else content.get("versions", {}).values()
        rows.append([f"`{name}`", about.removeprefix("Jobs of "), "; ".join(map(str, programs))])
    return table(["kind", "program and files", "version"], rows)


def arguments_page() -> str:
    parts = []
    for name in PROGRAMS:
        content = read_yaml(ROOT / "bench" / "tools" / "jobs" / f"{name}.yaml")
        versions = [*content.get("versions", {""})]
        parts += _of_program(argument_table(name, versions[0]))
    return f"""{MARK}# Arguments of other programs

This page lists each argument that `spbench import` reads, with the setting of a scenario that the argument
becomes, or the reason why it is approximated or refused. Arguments without effect on memory, bytes and time
are only in [the tables](../../bench/tools/jobs). `spbench import --explain` says this for your files.

## Kinds of job files

{kinds()}
{chr(10).join(parts)}"""


# -- commands ------------------------------------------------------------------------------------------------


def commands_page() -> str:
    parts = []
    for name in COMMANDS.names():
        command = COMMANDS.load(name)
        names = {"help_option_names": ["-h", "--help"], "terminal_width": 100}
        text = command.get_help(click.Context(command, info_name=f"spbench {name}", **names))
        parts.append(f"## spbench {name}\n\n```text\n{text}\n```\n")
    return f"""{MARK}# Commands

This is what `spbench COMMAND --help` prints. Results go to standard output, progress and messages to standard
error.

| exit code | meaning |
| --- | --- |
| 0 | done |
| 1 | a cell failed, a strategy is not green, or results are worse than the baseline |
| 2 | an error that the user can mend; one line says how |
| 70 | a fault of the program; `SPBENCH_DEBUG=1` shows where |
| 130 | interrupted |
| 141 | the reader of the output went away |

{chr(10).join(parts)}"""


def pages() -> dict[Path, str]:
    """The text of each page, by the page's path."""
    return {
        REFERENCE / "support.md": support_page(),
        REFERENCE / "arguments.md": arguments_page(),
        ROOT / "docs" / "cli.md": commands_page(),
    }


if __name__ == "__main__":
    old = {
        path: text
        for path, text in pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in old.items():
        print(path.relative_to(ROOT))
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    sys.exit("--check" in sys.argv and bool(old))
