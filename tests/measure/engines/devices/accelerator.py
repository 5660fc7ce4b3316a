"""An accelerator without hardware: a device type that is not the CPU, for fake tensors alone."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

#: the device type, where :func:`register` has been called
NAME = "noop"
COMPILER = shutil.which("g++")


def compiled(folder: Path) -> Path:
    """The library of the accelerator, compiled into ``folder``.

    Raises:
        subprocess.CalledProcessError: it does not compile.
    """
    assert COMPILER is not None
    root, library = Path(torch.__file__).parent, folder / "accelerator.so"
    include = [f"-I{root / 'include'}"]
    link = [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{root / 'lib'}"]
    source = Path(__file__).with_suffix(".cpp")
    subprocess.run(
        [COMPILER, "-O0", "-shared", "-fPIC", "-std=c++20", *include, str(source), "-o", str(library), *link],
        check=True,
    )
    return library


def register(library: Path) -> None:
    """Make the accelerator this process's, with fake process groups on it. There is no way back, so this
    belongs in a process of its own."""
    from torch.distributed import Backend
    from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend(NAME)
    module = ModuleType(NAME)
    # its streams and events do nothing, as torch.cpu's
    for name in (
        "Event",
        "Stream",
        "current_stream",
        "is_available",
        "is_initialized",
        "stream",
        "synchronize",
    ):
        setattr(module, name, getattr(torch.cpu, name))
    module.current_device = lambda: 0  # type: ignore[attr-defined]
    module.device_count = lambda: 1  # type: ignore[attr-defined]
    module._is_in_bad_fork = lambda: False  # type: ignore[attr-defined]
    torch._register_device_module(NAME, module)
    Backend.backend_capability[Backend.FAKE].append(NAME)
    for operator, kernel in _KERNELS.items():
        _LIBRARY.impl(operator, kernel, "PrivateUse1")


def _empty(size: Sequence[int], *_: Any, dtype: torch.dtype | None = None, **__: Any) -> Tensor:
    """A contiguous tensor whose storage says how large it is, and has no memory."""
    made = torch._C._acc.create_empty_tensor(tuple(size), dtype or torch.get_default_dtype())
    made.untyped_storage().resize_(made.numel() * made.element_size())
    return made


def _no_arithmetic(*_: Any) -> Tensor:
    raise NotImplementedError("there are fake tensors alone on this device")


#: a constant (torch.tensor of a list) is made on the CPU and copied, under fake tensors too; silu_backward
#: has kernels on the CPU and on CUDA, and without one it is computed by several operators
_KERNELS: dict[str, Callable[..., Tensor]] = {
    "empty.memory_format": _empty,
    "empty_strided": _empty,
    "_copy_from": lambda source, target, non_blocking=False: target,
    "silu_backward": _no_arithmetic,
}
_LIBRARY = torch.library.Library("aten", "IMPL")
