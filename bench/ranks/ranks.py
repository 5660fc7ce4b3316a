"""What runs work on ranks, wherever their processes are."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Self

from spbench.bench.ranks.rank_job import Job
from spbench.impls.axes import whole_mesh

#: of torch.distributed, by the type of the devices on which tensors are
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


class Ranks(ABC):
    """Runs one job after another, each in a process group of its own. Use it as a context manager.

    Attributes:
        size: the largest number of ranks that a job can have.
    """

    size: int

    def run(
        self,
        sizes: Mapping[str, int],
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float = 120.0,
        device: str = "cpu",
        backend: str = "",
    ) -> list[Any]:
        """Call ``function(mesh, *args)`` on every rank of a mesh; returns what each returned, by rank.

        Args:
            sizes: ranks along each axis of the mesh; axes that are left out have 1.
            function: of a module that the processes can import; its arguments and result are pickled.
            timeout_s: after it the job has failed and the processes are killed; the next job gets new ones.
            device: type of the devices on which the ranks' tensors are.
            backend: of torch.distributed; "": Gloo on CPUs, NCCL on GPUs, one a rank.

        Raises:
            RankError: a rank raised, ran out of memory, died, or did not answer in time.
            ValueError: the mesh has no such axis, or more than ``size`` ranks.
        """
        # pickled here, so that what cannot be pickled is the caller's error and reaches no rank
        work = pickle.dumps((function, args))
        job = Job(0, whole_mesh(sizes), device, backend or BACKENDS[device], timeout_s, work)
        if job.ranks > self.size:
            raise ValueError(f"a job on {job.ranks} ranks does not fit in a pool of {self.size}")
        return self._run(job)

    @abstractmethod
    def _run(self, job: Job) -> list[Any]:
        """What each rank returned; the job's number is still to be given."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what is held; another job gets it again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
