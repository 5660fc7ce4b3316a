"""A step of the user's own: a function of a Python file that knows torch, and not spbench.

The function builds model, optimizer and inputs, and returns a callable; each call of that does one training
step. When the function is called, torch.distributed's default process group exists. Errors within it name the
user's line.
"""

import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, described, suggestion
from spbench.bench.setting_values import STEP_FILE, names_a_step
from spbench.bench.yaml_files import read_yaml
from spbench.impls import Unsupported, flash_attn_if_absent

#: does one training step; may return the step's loss
Step = Callable[[], Any]
#: builds a training step
Build = Callable[[], Step]

#: folders of code that is not the user's; packages such as transformers are the user's
_ROOT = Path(__file__).resolve().parents[3]
_OTHERS = tuple(
    f"{os.path.realpath(folder)}{os.sep}"
    for folder in (Path(torch.__file__).parent, *(_ROOT / name for name in ("bench", "impls", "spbench")))
)
_PYTHON = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


@dataclass(frozen=True)
class OwnStep:
    """A training step of the user's.

    Attributes:
        name: "step.py:train", the name of the model in rows.
        source: the content of the file; "" for a function without a file.
        load: returns the function that builds the step; a file is run again at each call, because a module
            may keep what one rank has made.
    """

    name: str
    source: str
    load: Callable[[], Build]

    @classmethod
    def of(cls, step: "str | Build | Cell") -> "OwnStep":
        """The step of a text such as "step.py:train", of a function itself, or of a cell.

        Raises:
            UserError: the file cannot be read.
        """
        if isinstance(step, Cell):
            step = str((step.model_config_json or {}).get(STEP_FILE, step.model))
        if not isinstance(step, str):
            file = inspect.getsourcefile(step)
            name = f"{Path(file or 'function').name}:{getattr(step, '__name__', 'train')}"
            source = Path(file).read_text(encoding="utf-8") if file and os.path.isfile(file) else ""
            return cls(name, source, lambda: step)
        if not names_a_step(step):
            raise UserError(f"{step}: write FILE.py:FUNCTION, such as step.py:train")
        file, _, function = step.rpartition(":")
        path = Path(file)
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        return cls(f"{path.name}:{function}", source, lambda: _function(path, function))

    def built(self, build: Build) -> Step:
        """The callable that does one step, of the function that builds it.

        Raises:
            UserError: the function returns none.
        """
        step = build()
        if not callable(step):
            raise UserError(f"{self.name} returns {type(step).__name__}, and not a callable for one step")
        return step


def step_digest(cell: Cell) -> str:
    """The content of the file of a cell's step; "" for a step without a file."""
    return OwnStep.of(cell).source if cell.model_config_json else ""


def _function(path: Path, name: str) -> Build:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as Python does for a script
        sys.path.insert(0, folder)
    sys.modules[path.stem] = module  # classes of the file look up their module
    if "flash_attn" in path.read_text(encoding="utf-8"):
        flash_attn_if_absent()
    with named_lines(path.name):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{path} has no function {name}{suggestion(name, functions)}")
    build: Build = function
    return build


@cache
def users_file(path: str) -> str:
    """The name of a file if it is the user's code, or of a package; "" if it is torch's, spbench's or
    Python's own."""
    real = os.path.realpath(path)
    of_python = real.startswith(_PYTHON) and "-packages" not in real
    is_users = os.path.isfile(path) and not of_python and not real.startswith(_OTHERS)
    return os.path.basename(path) if is_users else ""


def line_of(frame: Any) -> str:
    """The line of the user's innermost code that a frame runs in, as "step.py:31"; "" if there is none."""
    while frame is not None:
        if name := users_file(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


#: what an error means under fake tensors, and how to mend it, by the error's name or by its package
_UNWATCHED = read_yaml(Path(__file__).with_name("unwatched.yaml"))


class StepError(UserError):
    """An error in the user's code, which names the line."""


@contextmanager
def named_lines(name: str) -> Iterator[None]:
    """Within the context, an error in the code of the step ``name`` becomes a :class:`UserError` that names
    the user's line; errors of spbench stay what they are.

    Raises:
        UserError: names the line, the error, and if it is one of fake tensors how to mend it.
    """
    try:
        yield
    except (StepError, Unsupported, KeyboardInterrupt):
        raise
    except BaseException as error:
        frames = [each for each in traceback.extract_tb(error.__traceback__) if users_file(each.filename)]
        places = [f"{users_file(each.filename)}:{each.lineno}" for each in frames]
        if isinstance(error, SyntaxError) and error.filename:
            where = f"{os.path.basename(error.filename)}:{error.lineno}"
        elif frames:
            of_file = (n for n in reversed(range(len(frames))) if users_file(frames[n].filename) in name)
            own = next(of_file, -1)
            where = f"{places[own]}, {frames[own].line}"
            where += f" (in {places[-1]})" if places[-1] != places[own] else ""
        elif isinstance(error, (UserError, SystemExit)):
            where = name
        else:
            raise  # spbench's own
        in_triton = frames and "triton" in Path(frames[-1].filename).parts
        means = _UNWATCHED.get("triton" if in_triton else type(error).__name__)
        said = means.format(error=getattr(error, "func", error)) if means else described(error)
        said = str(error) if isinstance(error, UserError) else said
        raise StepError(f"{where}: {said}") from error
