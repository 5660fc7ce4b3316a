"""FLOPs of attention kernels, by which steps are timed: a causal mask halves them, in every kernel."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward

B, Z, L, A = 2, 3, 512, 64
PAIRS = {False: L * L, True: L * (L + 1) // 2}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_whole_sequences_counts_what_a_block_of_a_ring_does(causal: bool) -> None:
    with fake_mesh({}, 0) as mesh, FakeTensorMode(), Recorder(mesh, events=True) as recorder:
        q, k, v, d_o = (torch.empty(B, Z, L, A, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
        with recorder.phase("forward"):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            o.backward(d_o.detach())
            block_o, lse = flash_attention(q.detach(), k.detach(), v.detach(), A**-0.5, causal)
            flash_attention_backward(
                d_o.detach(), q.detach(), k.detach(), v.detach(), block_o, lse, A**-0.5, causal
            )
    assert recorder.events is not None
    program = recorder.events.program()
    found = [int(flops) for flops in program.flops if flops]
    forward = 2 * 2 * B * Z * PAIRS[causal] * A
    assert found == [forward, forward * 5 // 2] * 2
