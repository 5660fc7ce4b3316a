"""A user's step calls attention, RMSNorm and dropout as a GPU runs them, also in recomputation. Each traced
rank of a user's step has a world of its own.
"""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from spbench import measure_step
from spbench.bench.measure.steps.fake_world import kernel_of, operators_of_gpus
from spbench.bench.measure.trace.torch_internals import FakeTensorMode
from spbench.impls import backward_flops, forward_flops

SHAPE = BATCH, HEADS, LENGTH, SIZE = 2, 4, 256, 64
FLASH, EFFICIENT, CUDNN, MATH = (
    *(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION),
    *(SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH),
)


@pytest.mark.parametrize(
    ("kernel", "dtype", "size", "masked", "shared"),
    [
        (FLASH, torch.bfloat16, 64, False, True),
        (EFFICIENT, torch.bfloat16, 64, True, False),
        (EFFICIENT, torch.float32, 64, False, False),
        (EFFICIENT, torch.bfloat16, 512, False, False),
        (MATH, torch.float32, 64, False, True),
    ],
)
def test_the_first_kernel_that_takes_the_tensors(kernel, dtype, size, masked, shared):
    q = torch.empty(1, 4, 8, size, dtype=dtype, device="meta")
    assert kernel_of(q, q, q, masked, shared) == kernel


def test_the_order_is_the_steps():
    q = torch.empty(1, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    with sdpa_kernel([CUDNN, FLASH], set_priority=True):
        assert kernel_of(q, q, q, False, False) == CUDNN
    with sdpa_kernel(MATH):
        assert kernel_of(q, q, q, False, False) == MATH


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT, CUDNN, MATH])
@pytest.mark.parametrize("masked", [False, True])
def test_every_kernel_has_gradients(kernel, masked):
    if masked and kernel == FLASH:
        pytest.skip("flash attention takes no mask")
    with operators_of_gpus(), FakeTensorMode(), sdpa_kernel(kernel):
        q, k, v = (torch.empty(SHAPE, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool) if masked else None
        output = scaled_dot_product_attention(q, k, v, mask)
        output.sum().backward()
        assert output.shape == SHAPE
        assert [x.grad.shape for x in (q, k, v)] == [SHAPE] * 3
    x = torch.randn(1, 1, 2, 4)  # outside, the CPU's own attention is back
    torch.testing.assert_close(scaled_dot_product_attention(x, x, x), (x @ x.mT / 2).softmax(-1) @ x)


def build(policy):
    """The step of one attention that is computed again in backward, unless ``policy`` keeps its output."""

    def train():
        weight = nn.Parameter(
            nn.init.trunc_normal_(torch.empty(SHAPE, device="cuda:0", dtype=torch.bfloat16))
        )

        def attention(q):
            q = q + torch.zeros(SHAPE, device="cuda", dtype=q.dtype)
            return scaled_dot_product_attention(q, q, q, is_causal=True)

        def contexts():
            return create_selective_checkpoint_contexts(policy)

        def step():
            checkpoint(attention, weight, use_reentrant=False, context_fn=contexts).sum().backward()

        return step

    return train


def keep(_, func, *args, **kwargs):
    flash = func is torch.ops.aten._scaled_dot_product_flash_attention.default
    return CheckpointPolicy.MUST_SAVE if flash else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(_, func, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


@pytest.mark.parametrize(("policy", "forwards"), [(keep, 1), (recompute, 2)])
def test_a_checkpoint_keeps_the_gpus_operator(policy, forwards):
    measured = measure_step(build(policy), world_size=1, cluster="dgx-h100").measurement
    shapes = (SHAPE,) * 3
    assert measured.flops["all"] == forwards * forward_flops(*shapes, True) + backward_flops(*shapes, True)
    assert not measured.unpriced_operators


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_rms_norm_keeps_a_number_per_row_where_torch_fuses_it(weight_dtype):
    def train():
        norm = nn.RMSNorm(1024, device="cuda", dtype=weight_dtype)
        x = torch.empty(2048, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        return lambda: norm(x).sum().backward()

    held = measure_step(train, world_size=1, cluster="dgx-h100").measurement.peak_held
    kept = held["activations"] + held["temporaries"]
    x_bytes = 2048 * 1024 * 2
    assert (kept < 3 * x_bytes) == (weight_dtype is torch.bfloat16)


def test_dropout_keeps_a_byte_per_number():
    def train():
        x = torch.empty(1024, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        dropout = nn.Dropout(0.1)
        return lambda: dropout(x).sum().backward()

    assert 2**20 in [each["bytes"] for each in measure_step(train, world_size=1, cluster="dgx-h100").held()]


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


def test_a_step_sees_a_gpu_and_tells_tensors_apart():
    def train():
        x, y = (torch.ones(4, 4, device="cuda") for _ in range(2))
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 8
        assert x.data_ptr() == x.view(16).data_ptr() != y.data_ptr()
        return lambda: x @ y

    assert measure_step(train, world_size=16, cluster="dgx-h100").measurement.flops["all"] == 16 * 2 * 4**3
