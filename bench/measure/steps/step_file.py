"""A step of the user's own: a function of a Python file that knows torch, and not spbench; and the kernels of
packages that the step calls.

The function builds model, optimizer and inputs, and returns a callable; each call of that does one training
step. When the function is called, torch.distributed's default process group exists. Errors within it name the
user's line.

Within :func:`recorded_launches` a package's own code runs, so it allocates and keeps what it would on a GPU.
Only the launch of a Triton kernel becomes an operator, which computes nothing, and whose price
triton_kernels.yaml knows. flash-attn's kernels are compiled, so its functions have a stand-in where the
package is not installed.
"""

import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, described, suggestion
from spbench.bench.files import users_file
from spbench.bench.measure.trace import torch_internals
from spbench.bench.setting_values import LARGEST_LENGTH, STEP_FILE, StandIn, names_a_step
from spbench.bench.yaml_files import read_yaml
from spbench.impls import Unsupported, flash_attn_if_absent

#: does one training step; may return the step's loss
Step = Callable[[], Any]
#: builds a training step
Build = Callable[[], Step]


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
    if FlashAttention not in sys.meta_path:
        sys.meta_path.append(FlashAttention)
    with named_lines(path.name):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [each for each, value in vars(module).items() if inspect.isfunction(value)]
        raise UserError(f"{path} has no function {name}{suggestion(name, functions)}")
    build: Build = function
    return build


#: what an error means under fake tensors, and how to mend it, by the error's name or words of its message
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
        text = f"{type(error).__name__}: {error}"
        means = next((_UNWATCHED[each] for each in _UNWATCHED if each in text), "")
        of_error = {"error": getattr(error, "func", error)}
        said = means.format(**of_error, **_UNWATCHED) if means else described(error)
        said = str(error) if isinstance(error, UserError) else said
        raise StepError(f"{where}: {said}") from error


# -- kernels of packages -------------------------------------------------------------------------------------

_KERNELS = read_yaml(Path(__file__).with_name("triton_kernels.yaml"))
#: the stand-ins in the step that runs
STANDING_IN: set[StandIn] = set()
#: the most written numbers of a tensor, such as ends of sequences, that a fake tensor keeps, in torch's words
_VALUES_KEPT = {"CONSTANT_NUMEL_LIMIT": 4096}


class FlashAttention:
    """Finds the stand-in of flash-attn, at the end of ``sys.meta_path``."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> ModuleSpec | None:
        # programs that only look whether the package exists take other paths if it does
        if name != "flash_attn" or sys._getframe(2).f_code.co_name != "_find_and_load_unlocked":
            return None
        flash_attn_if_absent()
        package: Any = sys.modules[name]
        packed = _of_known_lengths(package.flash_attn_varlen_func)
        package.flash_attn_varlen_func = package.flash_attn_interface.flash_attn_varlen_func = packed
        loader: Any = SimpleNamespace(create_module=lambda _: package, exec_module=lambda _: None)
        package.__spec__ = ModuleSpec(name, loader, is_package=True)  # which Python takes in any case
        return package.__spec__


def _of_known_lengths(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function, which gets the ends of sequences as real tensors where fake ones have values."""

    def called(
        q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, *args: Any, **options: Any
    ) -> Tensor:
        given = cu_seqlens_q, cu_seqlens_k
        ends = [getattr(x, "constant", x) for x in given]
        if unknown := any(x is None for x in ends):
            STANDING_IN.add(LARGEST_LENGTH)
        return function(q, k, v, *(given if unknown else ends), *args, **options)

    return called


@contextmanager
def recorded_launches() -> Iterator[None]:
    """Within the context, a launch of a Triton kernel calls the operator :func:`_operator`; the stand-ins of
    an earlier step are forgotten."""
    STANDING_IN.clear()
    jit = sys.modules.get("triton.runtime.jit")  # torch has imported Triton if it is installed
    launches = {"__getitem__": _launch_of} if jit else {}
    with (
        torch_internals.replaced(getattr(jit, "KernelInterface", torch), launches),
        torch_internals.replaced(sys.modules[torch_internals.FakeTensor.__module__], _VALUES_KEPT),
    ):
        yield


def _launch_of(kernel: Any, grid: Any) -> Callable[..., None]:
    while hasattr(kernel.fn, "arg_names"):  # within its tuner and heuristics
        kernel = kernel.fn

    def launch(*args: Any, **kwargs: Any) -> None:
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        flops, passes = _flops(kernel, given), _KERNELS["passes"].get(kernel.__name__, {})
        tensors = ((x, passes.get(name, 1)) for name, x in given.items() if isinstance(x, Tensor))
        first, *others = [x for x, times in tensors for _ in range(times)]
        kind = "unknown" if flops is None else "matmuls" if flops else "streaming"
        with torch_internals.below_autograd():
            _operator(f"triton_{kind}", re.sub(r"\W", "_", kernel.__name__))[0](first, others, flops or 0)

    return launch


def _flops(kernel: Any, given: Mapping[str, Any]) -> int | None:
    """The FLOPs of a launch with the arguments ``given``, by name: by a formula that the user has registered
    in torch, or by the table; None: there is neither."""
    if (formula := torch_internals.flop_registry.get(kernel)) is not None:
        return int(formula(**given))
    with suppress(NameError, TypeError):  # of another release, whose kernel has other arguments
        if (text := _KERNELS["flops"].get(kernel.__name__)) is not None:
            return int(eval(text, {"n": Tensor.numel, "__builtins__": {}}, dict(given)))
    return 0 if re.fullmatch("|".join(_KERNELS["streaming"]), kernel.__name__) else None


@cache
def _operator(namespace: str, name: str) -> tuple[Any, torch.library.Library]:
    """The operator of a kernel, which reads or writes each of its tensors once, and does so many FLOPs."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"{name}(Tensor first, Tensor(a!)[] out, int flops) -> ()")
    library.impl(name, lambda *_: None, "CompositeExplicitAutograd")
    operator = getattr(getattr(torch.ops, namespace), name)
    if namespace == "triton_matmuls":
        torch_internals.flop_registry[operator] = lambda first, out, flops, out_val=None: flops
    return operator.default, library  # whose end would be that of the operator
