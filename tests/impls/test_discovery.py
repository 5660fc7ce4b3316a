"""Things are found by being in a package's modules, or by an installed plug-in's entry points."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, Protocol

import pytest

from spbench.impls.discovery import DiscoveryError, FunctionModules, named_classes, named_values
from spbench.impls.models.model import Model
from spbench.impls.registries import all_models, all_strategies
from spbench.impls.strategies.base import Strategy
from tests.grid import tabled

Install = Callable[..., str]


class Animal(ABC):
    name: ClassVar[str]

    @abstractmethod
    def legs(self) -> int: ...


class Named(Protocol):
    name: ClassVar[str]


ANIMAL = "from tests.impls.test_discovery import Animal\n"
CAT = ANIMAL + "class Cat(Animal):\n    name = 'cat'\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes a package of these modules, and a distribution with that text of entry points; returns the
    package's name, which is another one in every test, as modules stay imported."""
    monkeypatch.syspath_prepend(tmp_path)
    package = "found_" + "".join(c for c in tmp_path.name if c.isalnum())

    def made(modules: dict[str, str], entries: str = "") -> str:
        (tmp_path / package).mkdir()
        for name, text in {"__init__": "", **modules}.items():
            (tmp_path / package / f"{name}.py").write_text(text)
        info = tmp_path / f"{package}-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1\n")
        (info / "entry_points.txt").write_text(entries.replace("PACKAGE", package))
        importlib.invalidate_caches()
        return package

    return made


def test_a_class_is_found_by_being_in_a_module(install: Install) -> None:
    package = install({"a": CAT, "b": "x = 1\n"})
    path = Path(importlib.import_module(package).__path__[0])
    # imported again elsewhere, it is the same; without a name of its own, it is not found
    (path / "c.py").write_text(
        f"from {package}.a import Cat\nclass Kitten(Cat): pass\nclass Dog(Cat):\n    name = 'dog'\n"
    )
    importlib.invalidate_caches()
    found = named_classes(package, Animal)
    assert {name: cls.__module__ for name, cls in found.items()} == {
        "cat": f"{package}.a",
        "dog": f"{package}.c",
    }
    assert named_classes(package, Animal) is found
    with pytest.raises(TypeError):
        found["cow"] = Animal  # type: ignore[index]


def test_a_protocol_can_be_the_base(install: Install) -> None:
    text = "from tests.impls.test_discovery import Named\nclass Mine(Named):\n    name = 'mine'\n"
    assert list(named_classes(install({"a": text}), Named)) == ["mine"]


def test_two_of_one_name_are_named(install: Install) -> None:
    package = install({"a": CAT, "b": CAT.replace("Cat", "Tiger")})
    both = rf"{package}\.a\.Cat and {package}\.b\.Tiger are each a .*'cat'; rename one"
    with pytest.raises(DiscoveryError, match=both):
        named_classes(package, Animal)


@pytest.mark.parametrize("target", ["plugin:Cow", "plugin"])
def test_an_entry_point_names_a_class_or_a_module(install: Install, target: str) -> None:
    # both modules are in one folder here; as a plug-in's, one is found twice and is the same class
    cow = CAT.replace("Cat", "Cow").replace("'cat'", "'cow'")
    package = install({"a": CAT, "plugin": cow}, f"[test.{target.replace(':', '')}]\nx = PACKAGE.{target}\n")
    assert list(named_classes(package, Animal)) == ["cat", "cow"]
    assert list(named_classes("tests.impls", Animal, f"test.{target.replace(':', '')}")) == ["cow"]


@tabled(__file__, "an_entry_point_that_cannot_be_used_is_named")
def test_an_entry_point_that_cannot_be_used_is_named(install: Install, text: str, message: str) -> None:
    group = f"test.bad{abs(hash(text))}"
    package = install({"plugin": text}, f"[{group}]\nplug = PACKAGE.plugin\n")
    with pytest.raises(DiscoveryError, match=message.replace("PACKAGE", package)):
        named_classes("tests.impls", Animal, group)


def test_values_are_found_in_modules_and_plug_ins(install: Install) -> None:
    entries = "[test.values]\none = PACKAGE.a\ntwo = PACKAGE.other:THINGS\n"
    package = install({"a": "SIZES = {'one': 1}\n", "b": "", "other": "THINGS = {'two': 2}\n"}, entries)
    assert named_values(package, "SIZES", int) == {"one": 1}
    assert named_values(package, "SIZES", int, "test.values") == {"one": 1, "two": 2}


@tabled(__file__, "values_that_cannot_be_used")
def test_values_that_cannot_be_used(
    install: Install, modules: dict[str, str], entry: str, message: str
) -> None:
    group = f"test.values{abs(hash(message))}"
    package = install(modules, f"[{group}]\n{entry}\n")
    with pytest.raises(DiscoveryError, match=message):
        named_values(package, "SIZES", int, group if entry else "")


def test_a_module_offers_one_function_by_its_name_or_several_by_theirs(install: Install) -> None:
    several = 'draw_a = abs\n"""The first. More."""\ndraw_b = len\n"""The second."""\n'
    one = '"""The third."""\n\n\ndef draw(x):\n    """Draws."""\n\n\ndef draw_bars(x): ...\n'
    functions = FunctionModules(install({"several": several, "one": one, "none": ""}), "*", "draw", "figures")
    assert functions.names() == ["a", "b", "one"]
    assert functions.summaries() == {"a": "The first", "b": "The second", "one": "The third"}
    assert functions.docstrings() == {"a": "The first. More.", "b": "The second.", "one": "Draws."}
    assert functions.load("b") is len


def test_what_the_project_finds() -> None:
    assert next(iter(all_strategies().items())) == ("single", Strategy)
    assert all_strategies()["ulysses"].__module__ == "spbench.impls.strategies.ulysses"
    assert all(isinstance(model, Model) for model in all_models().values())
    assert {"bert-base", "tnl-tiny", "st-dit-tiny"} <= set(all_models())
