"""What the host takes beside operators' own times, on a CPU: calls too small for anything else to matter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.bench.tools.calibrate.rate_points import RatePoint, RateSweep, timed

#: how the points begin
HOST = "host: "
#: an operator's call with its node made for backward, and without Python's and autograd's part of it
WITH_NODE, BARE = HOST + "operator with its node", HOST + "operator alone"
VIEW, BACKWARD, MODULE = HOST + "view", HOST + "operator in backward", HOST + "module"
#: operators in a row, of which one's part in backward is taken
_IN_A_ROW = 50


def host_points(sweep: RateSweep) -> Iterator[RatePoint]:
    """A point of each, on all ranks at once; ``extent`` is how many of them a call has."""
    x = torch.ones(1, requires_grad=True)
    bare, bare_x, identity = torch.ops.aten.neg.default, x.detach(), nn.Identity()
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        WITH_NODE: (1, partial(torch.neg, x)),
        BARE: (1, partial(bare, bare_x)),
        VIEW: (1, partial(x.view, 1)),
        BACKWARD: (_IN_A_ROW, partial(_backward, _row(x), x)),
        MODULE: (1, partial(identity, x)),
    }
    for operation, (count, call) in calls.items():
        samples = timed(call, "cpu", sweep)
        yield RatePoint(operation, f"{count} in a call", count, "fp32", dist.get_world_size(), samples)


def _row(x: Tensor) -> Tensor:
    for _ in range(_IN_A_ROW):
        x = torch.neg(x)
    return x


def _backward(y: Tensor, x: Tensor) -> None:
    torch.autograd.grad(y, x, retain_graph=True)
