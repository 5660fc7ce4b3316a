"""What CONTRIBUTING.md says about rooms, additions and files is so."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.plugins.additions import ADDITIONS, EXAMPLES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def table(header: str) -> list[list[str]]:
    """The cells of the Markdown table whose first column has that header."""
    lines = TEXT[TEXT.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def imported(path: Path) -> Iterator[str]:
    """The modules of spbench that a file imports, without the prefix."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name.removeprefix("spbench.") for name in names if name.startswith("spbench."))


def test_impls_and_plots_know_nothing_of_bench() -> None:
    for path in [*(ROOT / "impls").rglob("*.py"), *(ROOT / "plots").rglob("*.py")]:
        assert not [name for name in imported(path) if name.startswith("bench")], path


def test_of_impls_only_the_registries_import_the_peers() -> None:
    rooms = {path: set(imported(path)) for path in (ROOT / "impls").rglob("*.py")}
    peers = {path for path in rooms if path.parent.name == "peers"}
    importing = {path for path, names in rooms.items() if any(n.startswith("impls.peers") for n in names)}
    assert {path.relative_to(ROOT).as_posix() for path in importing - peers} == {"impls/registries.py"}
    of_rooms = {name.split(".")[1] for path in peers for name in rooms[path] if name.count(".") > 1}
    modules = {path.stem for path in (ROOT / "impls").glob("*.py")}
    assert of_rooms - modules == {"peers", "kernels", "strategies"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch(path: Path) -> Iterator[str]:
    """The dotted names of torch in a file that have a private part; operators count as public."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) and is_private(node.attr) else []
        for name in names:
            package, *parts = name.split(".")
            if package == "torch" and parts[:1] != ["ops"] and any(map(is_private, parts)):
                yield name


def test_bench_takes_private_names_of_torch_where_it_says() -> None:
    (habit,) = [each for each in TEXT.split("\n- ") if "private names of torch" in each]
    told = {f"bench/{name}" for name in re.findall(r"bench/([\w/]+\.py)", habit)}
    modules = {path for path in (ROOT / "bench").rglob("*.py") if any(private_names_of_torch(path))}
    assert {path.relative_to(ROOT).as_posix() for path in modules} == told


def test_each_kind_of_addition_has_an_example_that_is_run() -> None:
    listed = {
        (group.strip("`"), room.strip("`"), example.split("(")[1].rstrip(")"))
        for _, room, group, example in table("kind")
    }
    folder = EXAMPLES.relative_to(ROOT)
    assert listed == {(a.group, a.room, str(folder / a.file)) for a in ADDITIONS}


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", TEXT)
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_it_is_short() -> None:
    assert len(TEXT.splitlines()) < 150
