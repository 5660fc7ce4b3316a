"""Discovery: finds the classes and presets in a package's modules, and those of installed plug-ins.

A class or preset is added by a file in a package, by an entry point of another distribution, or by a file of
the user's (:mod:`spbench.impls.loose_files`); no list names it.
"""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distributions, entry_points, version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, TypeVar

from spbench.impls import loose_files
from spbench.impls.loose_files import raised

T = TypeVar("T")

#: the advice of an error if a peer's package is missing
INSTALL = "install the extra peers: pip install -c constraints.txt -e '.[peers]'"

#: prefix of the groups of entry points in which other distributions offer strategies, models, ...
PLUGIN_GROUPS = "spbench."


class DiscoveryError(Exception):
    """Two values have one name, or an entry point cannot be used; the message names these.

    The class is no ValueError, because pydantic would report that as an error of the cell.
    """


@cache
def installed_version(distribution: str) -> str | None:
    """The version of a distribution, or None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def versions(requires: Iterable[str]) -> dict[str, str | None]:
    """The versions of distributions, by their names in :attr:`Strategy.requires`; None: not installed."""
    return {name: installed_version(name) for name in requires}


def absent(requires: Iterable[str]) -> list[str]:
    """The distributions of ``requires`` that are not installed."""
    return [name for name, found in versions(requires).items() if found is None]


def named_classes(package: str, base: type[T], group: str = "") -> Mapping[str, type[T]]:
    """The classes derived from ``base``, and ``base``, that define their own ``name``, by that name.

    Args:
        package: import name of the package; every module directly in it is imported and searched.
        group: a group of entry points, each of which names a class, or a module that is searched like those
            of the package. Empty: no plug-ins.

    Returns a read-only mapping, ``base`` first, then the classes of the package, by module; the same one at
    every call.

    Raises:
        DiscoveryError: two classes have one name, or an entry point cannot be loaded or names no such class.
    """
    return _named_classes(package, base, group, loose_files.loose_paths())  # type: ignore[arg-type]


@cache
def _named_classes(package: str, base: type, group: str, files: tuple[Path, ...]) -> Mapping[str, type]:
    classes_by_name = _Names(f"class derived from {base.__name__}")
    for place in (base, *_modules(package), *(loose_files.modules() if group else ())):
        for cls in _classes_in(place, base):
            classes_by_name.add(vars(cls)["name"], cls, f"{cls.__module__}.{cls.__qualname__}")
    for label, loaded in _plugins(group):
        classes = list(_classes_in(loaded, base))
        if not classes:
            raise DiscoveryError(
                f"{label} names no class derived from {base.__name__} with a name of its own"
            )
        for cls in classes:
            classes_by_name.add(vars(cls)["name"], cls, f"{cls.__module__}.{cls.__qualname__}")
    return MappingProxyType(classes_by_name.values)


def named_values(package: str, attribute: str, kind: type[T], group: str = "") -> Mapping[str, T]:
    """The values in the mappings called ``attribute`` of a package's modules, by their keys.

    Args:
        package: import name of the package; modules directly in it that lack the attribute are passed over.
        attribute: name of a module's attribute, which is a mapping from names to values.
        kind: the type of all values.
        group: a group of entry points, each of which names such a mapping or a module that has one.
            Empty: no plug-ins.

    Returns a read-only mapping, the package's values first, by module; the same mapping at every call.

    Raises:
        DiscoveryError: two values have one name, a value has another type, or an entry point cannot be loaded
            or names no such mapping.
    """
    return _named_values(package, attribute, kind, group, loose_files.loose_paths())  # type: ignore[arg-type]


@cache
def _named_values(
    package: str, attribute: str, kind: type, group: str, files: tuple[Path, ...]
) -> Mapping[str, Any]:
    values_by_name = _Names(kind.__name__)
    modules = [*_modules(package), *(loose_files.modules() if group else ())]
    sources = [(f"{m.__name__}.{attribute}", vars(m).get(attribute, {})) for m in modules]
    for label, loaded in _plugins(group):
        sources.append((label, getattr(loaded, attribute, None) if inspect.ismodule(loaded) else loaded))
    for label, mapping in sources:
        if not isinstance(mapping, Mapping):
            raise DiscoveryError(f"{label} names neither a mapping nor a module with one called {attribute}")
        for name, value in mapping.items():
            if not isinstance(value, kind):
                raise DiscoveryError(f"{label}: {name!r} is a {type(value).__name__}, not a {kind.__name__}")
            values_by_name.add(name, value, label)
    return MappingProxyType(values_by_name.values)


@dataclass(frozen=True)
class FunctionModules:
    """The functions in the modules of a package, each of which is imported only by :meth:`load`.

    The function NAME is ``function`` in a module whose path below the package is ``pattern`` with NAME for
    its last star; or ``function`` _ NAME in any such module, each with ``_`` for ``-`` of the name (assigned
    there, or defined if the pattern begins with a word); or an entry point NAME of the group.

    Attributes:
        package: import name of the package.
        pattern: pattern of the modules' paths below the package, without ".py": "to_*", "*/*_command".
        function: name of the function in the modules; entry points name the function itself.
        kind: plural noun for the functions, for messages.
        group: the group of entry points; empty: no plug-ins.
    """

    package: str
    pattern: str
    function: str
    kind: str
    group: str = ""

    def names(self) -> list[str]:
        """The names of all functions in alphabetical order; only the package is imported."""
        return sorted({place.name for place in self._places()})

    def __contains__(self, name: str) -> bool:
        return name in self.names()

    def load(self, name: str) -> Callable[..., Any]:
        """The function of that name.

        Raises:
            DiscoveryError: no function or several have that name, or its module cannot be imported.
        """
        places = [place for place in self._places() if place.name == name]
        if len(places) != 1:
            values = " and ".join(place.value for place in places) or "none is installed"
            raise DiscoveryError(f"{len(places)} {self.kind} are called {name!r}: {values}")
        try:
            loaded: Callable[..., Any] = places[0].load()
        except (ImportError, AttributeError, SystemExit) as error:
            what = f"{self.kind.removesuffix('s')} {name} ({places[0].value})"
            said = raised(error) if isinstance(error, SystemExit) else error
            raise DiscoveryError(f"the {what} cannot be loaded: {said}") from error
        return loaded

    def docstrings(self) -> dict[str, str]:
        """The docstrings of the functions, or the texts below assignments, by name; "" if there is none. The
        files are parsed, and not imported."""
        return {
            place.name: _definitions(_file(place)).get(place.attr, _NONE).text for place in self._places()
        }

    def summaries(self) -> dict[str, str]:
        """The first sentences of the docstrings of the functions' modules, or of the texts below assignments
        or in functions ``function`` _ NAME, by name. The files are parsed, and not imported."""
        sentences = {}
        for place in self._places():
            defined = _definitions(_file(place))
            own = defined.get(place.attr, _NONE)
            text = own.text if own.is_assigned or place.attr != self.function else defined.get("", _NONE).text
            sentences[place.name] = " ".join(re.split(r"\.\s|\n\n", text)[0].rstrip(".").split())
        return sentences

    def _places(self) -> Sequence[EntryPoint]:
        return _places(self, tuple(importlib.import_module(self.package).__path__))


@cache
def _places(modules: FunctionModules, folders: Sequence[str]) -> Sequence[EntryPoint]:
    """The functions of plug-ins and of these folders of the package as entry points, in alphabetical order of
    names; cached, because a search for entry points reads a file of every distribution."""
    before, _, after = modules.pattern.rpartition("/")[2].partition("*")
    dash = "-" if before else "_"
    places = [*entry_points(group=modules.group)] if modules.group else []
    for folder in folders:
        for path in Path(folder).glob(f"{modules.pattern}.py"):
            module = ".".join([modules.package, *path.relative_to(folder).with_suffix("").parts])
            for attr, definition in _definitions(path).items():
                if attr == modules.function:
                    name = path.stem.removeprefix(before).removesuffix(after)
                elif attr.startswith(f"{modules.function}_") and (definition.is_assigned or before):
                    name = attr.removeprefix(f"{modules.function}_")
                else:
                    continue
                places.append(EntryPoint(name.replace("_", dash), f"{module}:{attr}", modules.group))
    return sorted(places, key=lambda place: (place.name, place.value))


class _Definition(NamedTuple):
    """A function or an assignment at the top of a module: its docstring, or the text below it."""

    text: str
    is_assigned: bool = False


_NONE = _Definition("")


@cache
def _definitions(path: Path) -> Mapping[str, _Definition]:
    """The definitions in a Python file by name, and the file's docstring by the name ""; empty for a file
    that cannot be read or parsed."""
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return {}
    texts = [
        inspect.cleandoc(node.value.value)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        else ""
        for node in [*body, ast.Pass()]
    ]
    definitions = {"": _Definition(texts[0])}
    for node, below in zip(body, texts[1:], strict=True):
        if isinstance(node, ast.FunctionDef):
            definitions[node.name] = _Definition(ast.get_docstring(node) or "")
        elif isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            definitions |= dict.fromkeys(targets, _Definition(below, is_assigned=True))
    return definitions


def _file(place: EntryPoint) -> Path:
    """The path of the module that an entry point names; a path that cannot be read if there is none."""
    try:
        spec = importlib.util.find_spec(place.module)
    except ImportError:
        spec = None
    return Path((spec and spec.origin) or "")


def looked_up(known: Mapping[str, T], name: str, kind: str) -> T:
    """The value called ``name`` in a mapping.

    Raises:
        KeyError: there is no such value; the message lists the names of all values.
    """
    if name not in known:
        raise KeyError(f"unknown {kind} {name!r}; choices: {', '.join(sorted(known))}")
    return known[name]


#: a name as commands accept it, where a comma separates names, "+" strategies, "/" folders, ":" file and name
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]*")


class _Names:
    """Classes or values by name, and the place where each is defined."""

    def __init__(self, what: str):
        self.what = what
        self.values: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def add(self, name: str, value: Any, place: str) -> None:
        """Add the value defined at ``place`` under ``name``; the same value may be added several times."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise DiscoveryError(
                f"{place}: {name!r} is no name of a {self.what}: it needs letters, digits, '_', '-' or '.'"
            )
        if name in self.values and self.values[name] is not value:
            raise DiscoveryError(
                f"two of one name: {self.places[name]} and {place} are each a {self.what} named {name!r}; "
                "rename one"
            )
        self.values.setdefault(name, value)
        self.places.setdefault(name, place)


def _modules(package: str) -> Iterator[ModuleType]:
    """Yields the modules directly in a package, in alphabetical order; no subpackages."""
    for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if not module.ispkg:
            yield importlib.import_module(f"{package}.{module.name}")


def _classes_in(place: Any, base: type) -> Iterator[type]:
    """Yields the named classes derived from ``base`` in a module, or the class ``place`` itself."""
    for value in vars(place).values() if inspect.ismodule(place) else [place]:
        # looks at the method resolution order, because issubclass refuses protocols
        if inspect.isclass(value) and base in value.__mro__ and vars(value).get("name"):
            yield value


def _plugins(group: str) -> Iterator[tuple[str, Any]]:
    """Yields (label for messages, loaded object) of each entry point of a group."""
    for entry in entry_points(group=group) if group else ():
        label = f"the entry point {entry.name} = {entry.value} of {group}"
        try:
            loaded = entry.load()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            what = f"cannot be loaded: {raised(error)}; mend or uninstall it"
            raise DiscoveryError(f"{label} {what}") from error
        yield label, loaded


def plugin_entries() -> list[EntryPoint]:
    """The entry points of all plug-ins, in every group; no plug-in is imported."""
    entries = (entry for distribution in distributions() for entry in distribution.entry_points)
    return [entry for entry in entries if entry.group.startswith(PLUGIN_GROUPS)]


def plugin_files() -> Iterator[Path]:
    """Yields the Python files of the plug-ins' packages, and files that are in no package
    (:mod:`spbench.impls.loose_files`); no file is imported."""
    yield from loose_files.loose_paths()
    for package in {entry.module.split(".")[0] for entry in plugin_entries()}:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            for folder in spec.submodule_search_locations:
                yield from Path(folder).rglob("*.py")
        elif spec is not None and spec.origin is not None:
            yield Path(spec.origin)
