"""Each traced rank of a user's step has a world of its own."""

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

from spbench import measure_step


def of_cached_sharding():
    """A step that takes its mesh from the result of an operator, whose sharding DTensor keeps."""
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    mesh = (distribute_tensor(torch.ones(4), mesh, [Replicate()]) + 1).device_mesh
    return lambda: distribute_tensor(torch.ones(4), mesh, [Replicate()])


def test_a_mesh_is_of_the_ranks_own_world():
    measured = measure_step(of_cached_sharding, world_size=4, cluster="dgx-h100", ranks=None)
    assert str(measured.classes) == "ranks 0, 1, 2, 3 of 4 traced; one class"


def of_streams():
    stream: torch.cuda.Stream | None = torch.cuda.Stream()
    weight = nn.Parameter(torch.ones(4, 4, device="cuda"))

    def step():
        with torch.cuda.stream(stream):
            (weight @ weight).sum().backward()

    return step


def test_streams_of_a_gpu_can_be_made_and_named():
    assert measure_step(of_streams, world_size=1, cluster="dgx-h100").measurement.status == "ok"
