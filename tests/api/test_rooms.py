"""The rooms of bench are as CONTRIBUTING.md has them, and within the budget that stands there. What
CONTRIBUTING.md says about rooms, additions and files is so.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib import import_module
from pathlib import Path

import click
import pytest

from spbench import impls
from spbench.bench import measure
from spbench.bench.command_line.cli import cli
from tests.plugins.additions import ADDITIONS, EXAMPLES

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def table(header: str) -> list[list[str]]:
    """The cells of the Markdown table whose first column has that header."""
    lines = TEXT[TEXT.index(f"| {header} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def trees(of: str = "bench") -> Iterator[tuple[str, ast.Module]]:
    """The syntax trees of the modules of a folder, by their names below it."""
    for path in (ROOT / of).rglob("*.py"):
        name = ".".join(path.relative_to(ROOT / of).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(path.read_text())


@cache  # of these nodes alone, because whole trees would keep the garbage collector busy
def nodes(of: str = "bench") -> dict[str, list[ast.AST]]:
    """The imports and attributes in each module of a folder, by the modules' names below it."""
    kinds = ast.Import | ast.ImportFrom | ast.Attribute
    return {name: [n for n in ast.walk(tree) if isinstance(n, kinds)] for name, tree in trees(of)}


def named(node: ast.AST) -> list[str]:
    """The dotted names that an import takes; none of another node."""
    if isinstance(node, ast.ImportFrom) and node.module:
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def imported(name: str, of: str) -> set[str]:
    """The modules of spbench that a module of a folder imports, without the prefix."""
    names = {each for node in nodes(of)[name] for each in named(node)}
    return {each.removeprefix("spbench.") for each in names if each.startswith("spbench.")}


def imports(name: str, of: str = "bench") -> Iterator[str]:
    """The modules of a folder that a module of it imports, wherever in it, also for types alone."""
    for each in imported(name, of):
        dotted = each.removeprefix(f"{of}.") if each.startswith(f"{of}.") else ""
        while dotted and dotted not in nodes(of):
            dotted = dotted.rpartition(".")[0]
        if dotted and dotted != name:
            yield dotted


def test_impls_and_plots_know_nothing_of_bench() -> None:
    for of in ("impls", "plots"):
        for name in nodes(of):
            assert not [each for each in imported(name, of) if each.startswith("bench")], name


def test_of_impls_only_the_registries_import_the_peers() -> None:
    rooms = {name: imported(name, "impls") for name in nodes("impls")}
    peers = {name for name in rooms if name.split(".")[0] == "peers"}
    importing = {name for name, names in rooms.items() if any(n.startswith("impls.peers") for n in names)}
    assert importing - peers == {"registries"}
    of_rooms = {each.split(".")[1] for name in peers for each in rooms[name] if each.count(".") > 1}
    modules = {path.stem for path in (ROOT / "impls").glob("*.py")}
    assert of_rooms - modules == {"peers", "kernels", "strategies"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names_of_torch(node: ast.AST) -> Iterator[str]:
    """The dotted names of torch in a node that have a private part; operators count as public."""
    for name in [ast.unparse(node)] if is_private(getattr(node, "attr", "")) else named(node):
        package, *parts = name.split(".")
        if package == "torch" and parts[:1] != ["ops"] and any(map(is_private, parts)):
            yield name


def test_bench_takes_private_names_of_torch_where_it_says() -> None:
    (habit,) = [each for each in TEXT.split("\n- ") if "private names of torch" in each]
    told = {name.replace("/", ".") for name in re.findall(r"bench/([\w/]+)\.py", habit)}
    assert {name for name in nodes() if any(map(any, map(private_names_of_torch, nodes()[name])))} == told


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


#: by room: what the table lets it import, beside the modules at the top
TABLE = {room.strip("`"): {*may.split(", ")} - {""} for room, _, may in table("room")}


def room(name: str) -> str:
    """The room of a module; "" at the top."""
    first, *others = name.split(".")
    if first in ("measure", "tools"):
        return "/".join([first, *others[:1]])
    return first if first == "command_line" else ""


@cache
def arrows() -> dict[str, set[str]]:
    """The rooms that each room imports."""
    found: dict[str, set[str]] = {each: set() for each in [*TABLE, ""]}
    for name in nodes():
        if (of := room(name)) in found:
            found[of] |= {room(each) for each in imports(name)} - {of}
    return found


def test_each_room_is_in_the_table() -> None:
    folders = [path for floor in ("measure", "tools") for path in (ROOT / "bench" / floor).iterdir()]
    rooms = {
        path.relative_to(ROOT / "bench").as_posix() for path in folders if (path / "__init__.py").exists()
    }
    assert rooms | {"command_line"} == set(TABLE)


@pytest.mark.parametrize("name", ["", *TABLE])
def test_a_room_imports_what_it_may(name: str) -> None:
    floors = {each.split("/")[1]: each for each in TABLE if "/" in each}
    allowed = {floors[each] for each in TABLE.get(name, ())}
    found = arrows()[name] - {""}
    if name.startswith("tools/"):
        found -= {"measure", "command_line"}
    elif name == "command_line":
        found -= {"measure"}
    assert found == allowed


def test_rooms_import_each_other_in_no_circle() -> None:
    TopologicalSorter(arrows()).prepare()  # raises CycleError


def in_circles(of: str) -> set[str]:
    """The modules of a folder that import themselves by way of others."""
    graph = {name: set(imports(name, of)) for name in nodes(of)}

    def reached(name: str) -> set[str]:
        behind, ahead = set[str](), [name]
        while ahead:
            ahead = [each for here in ahead for each in graph[here] - behind]
            behind.update(ahead)
        return behind

    return {name for name in graph if name in reached(name)}


def test_bench_goes_through_the_door_of_impls() -> None:
    """The names of impls/__init__.pyi are all that bench takes of impls, and bench takes each of them."""
    taken = set[str]()
    for name, of_module in nodes().items():
        for node in of_module:
            within = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            within += [f"{node.module}"] if isinstance(node, ast.ImportFrom) else []
            assert not [each for each in within if each.startswith("spbench.impls.")], name
            if isinstance(node, ast.ImportFrom) and node.module == "spbench.impls":
                taken |= {alias.name for alias in node.names}
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "impls":
                taken.add(node.attr)
    stub = ast.parse((ROOT / "impls" / "__init__.pyi").read_text())
    lines = [line for line in stub.body if isinstance(line, ast.ImportFrom)]
    assert taken == {alias.name for line in lines for alias in line.names}
    for line in lines:
        home = import_module(f"{line.module}")
        assert all(getattr(impls, each.name) is getattr(home, each.name) for each in line.names)
    with pytest.raises(AttributeError, match="no attribute 'strategies_of'"):
        impls.__getattr__("strategies_of")


def functions() -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for _, tree in trees():
        yield from (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def lines(folder: str) -> int:
    return sum(len(path.read_text().splitlines()) for path in (ROOT / folder).rglob("*.py"))


def options() -> int:
    with click.Context(cli) as context:
        commands = [cli.get_command(context, name) for name in cli.list_commands(context)]
    return len({name for command in commands if command for p in command.params for name in p.opts[:1]})


def local_imports() -> int:
    within = {id(n): n for function in functions() for n in ast.walk(function)}
    return sum(isinstance(n, ast.Import | ast.ImportFrom) for n in within.values())


def door_names() -> dict[str, str]:
    """The module of each name at the door of the instrument."""
    stub = ast.parse((ROOT / "bench/measure/__init__.pyi").read_text())
    imported = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: node.module or "" for node in imported for alias in node.names}


def test_each_name_at_the_door_is_taken_and_is_no_room() -> None:
    """A room of that name would hide it."""
    above = [of_module for name, of_module in nodes().items() if not name.startswith("measure")]
    taken = [node for of_module in [*above, *nodes("spbench").values()] for node in of_module]
    imports = [n for n in taken if isinstance(n, ast.ImportFrom) and n.module == "spbench.bench.measure"]
    attributes = {n.attr for n in taken if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "measure"}
    assert attributes | {alias.name for node in imports for alias in node.names} == {*door_names()}
    assert not {*door_names()} & {path.name for path in (ROOT / "bench/measure").iterdir()}


def test_each_name_at_the_door_says_what_it_is() -> None:
    """A function or a class in its docstring, a constant in a comment above it."""
    unsaid = []
    for name, home in door_names().items():
        value, source = getattr(measure, name), inspect.getsource(import_module(home))
        above = re.search(rf"^#: .*\n(?:(?:#: |\w+ = ).*\n)*(?:\w+, )*{name}\b.* = ", source, re.M)
        is_defined = inspect.isclass(value) or re.search(rf"^def {name}\b", source, re.M)
        said = value.__doc__ if is_defined else above
        unsaid += [] if said else [name]
    assert not unsaid


@pytest.mark.parametrize(("of", "most"), table("of"))
def test_the_budget(of: str, most: str) -> None:
    if words := re.fullmatch(r"lines of `([\w/]+)`", of):
        number = lines(words[1])
    elif of == "files of `bench`":
        number = len(nodes())
    elif of == "lines of a file of `bench`":
        number = max(len(path.read_text().splitlines()) for path in (ROOT / "bench").rglob("*.py"))
    elif of == "lines of a function of `bench`":
        number = max((f.end_lineno or 0) - f.lineno + 1 for f in functions())
    elif words := re.fullmatch(r"files of `(\w+)` that import each other in a circle", of):
        number = len(in_circles(words[1]))
    elif of == "imports within functions of `bench`":
        number = local_imports()
    elif of == "names at the door of `bench/measure`":
        number = len(door_names())
    else:
        assert of == "options of commands"
        number = options()
    assert number <= int(most), f"{number} {of}"
