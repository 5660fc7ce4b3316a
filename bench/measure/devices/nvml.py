"""NVIDIA's management library, through nvidia-ml-py: opening it, finding a GPU, readings that may be missing.

The library comes with the driver and needs no CUDA build of torch. A single missing reading is None; where
nothing can be read, an :class:`NvmlProblem` of one line is raised.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from spbench.bench.yaml_files import read_yaml

#: errors after which nothing can be read, by their names in nvidia-ml-py, with meaning and remedy; and
#: those after which every reading of the GPU would fail too
_TABLE = read_yaml(Path(__file__).with_suffix(".yaml"))


class NvmlProblem(Exception):
    """Nothing can be read; the text is one line: the problem (``what``) and the ``remedy``."""

    def __init__(self, what: str, remedy: str):
        super().__init__(f"{what}: {remedy}")
        self.what, self.remedy = what, remedy


class Nvml:
    """The library, open inside ``with``; its functions and constants are called by their names.

    Raises:
        NvmlProblem: on entry, if the library cannot be used; on a reading, if none is possible any more.
    """

    def __enter__(self) -> Self:
        try:
            import pynvml
        except ImportError as error:
            raise NvmlProblem("nvidia-ml-py is not installed", "pip install nvidia-ml-py") from error
        self._library = pynvml
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise self._problem(error) from error
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(self._library.NVMLError):
            self._library.nvmlShutdown()

    def constant(self, name: str) -> Any:
        """A constant of the library; None if this version of nvidia-ml-py lacks it."""
        return getattr(self._library, name, None)

    def read(self, functions: str, *arguments: Any, on_refusal: Callable[[], object] | None = None) -> Any:
        """The result of a function; None if this GPU, driver or nvidia-ml-py lacks the function, or the user
        may not call it; in the last case ``on_refusal`` is called.

        Args:
            functions: names as "newer|older": the first function that driver and nvidia-ml-py have is called.
            arguments: the function's arguments; a text is the name of a constant.
        """
        library = self._library
        *newer, oldest = functions.split("|")
        try:
            values = [getattr(library, each) if isinstance(each, str) else each for each in arguments]
            for name in filter(lambda name: hasattr(library, name), newer):
                with suppress(library.NVMLError_FunctionNotFound):
                    return getattr(library, name)(*values)
            return getattr(library, oldest)(*values)
        except library.NVMLError as error:
            if error.value in {self.constant(name) for name in _TABLE["fatal"]}:
                raise self._problem(error) from error
            if on_refusal is not None and error.value == library.NVML_ERROR_NO_PERMISSION:
                on_refusal()
        except AttributeError:  # of an older nvidia-ml-py
            pass
        return None

    def gpus(self) -> list[Any]:
        """The handles of all GPUs, in the library's order; None for a GPU without a handle."""
        count = self.read("nvmlDeviceGetCount") or 0
        return [self.read("nvmlDeviceGetHandleByIndex", index) for index in range(count)]

    def gpu(self, uuid: str) -> Any:
        """The handle of the GPU, or of the MIG instance of one, with that UUID.

        Args:
            uuid: with the prefix "GPU-" or "MIG-", as nvidia-smi -L prints it, or without, as CUDA gives it.

        Raises:
            NvmlProblem: there is no such GPU, or it cannot be used.
        """
        library = self._library
        prefixes = ("",) if uuid.startswith(("GPU-", "MIG-")) else ("GPU-", "MIG-")
        for prefix in prefixes:
            try:
                return library.nvmlDeviceGetHandleByUUID(prefix + uuid)
            except library.NVMLError as error:
                problem = self._problem(error)
                if error.value not in (library.NVML_ERROR_NOT_FOUND, library.NVML_ERROR_INVALID_ARGUMENT):
                    break
        raise problem

    def _problem(self, error: Any) -> NvmlProblem:
        for name, (what, remedy) in _TABLE["meanings"].items():
            if self.constant(name) == error.value:
                return NvmlProblem(what, remedy)
        return NvmlProblem(f"NVML says {error}", "see nvidia-smi")
