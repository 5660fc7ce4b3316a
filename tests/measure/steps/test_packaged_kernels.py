"""A user's step calls kernels of packages that are not here: FlashAttention has a form, and of others the
message has three lines that give one."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from spbench import measure_step
from spbench.bench.errors import UserError
from spbench.impls import forward_flops
from spbench.impls.peers.flash_attn_stand_in import _of_lengths, _whole

STEP = """
import torch
{}
def train():
    q = torch.randn(1, 256, 4, 64, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([0, 128, 256], dtype=torch.int32)
    return lambda: {}.sum().backward()
"""
WHOLE, PACKED = (
    "flash_attn_func(q, q, q, causal=True)",
    "flash_attn_varlen_func(*[q[0]] * 3, ends, ends, 128, 128)",
)


def traced(folder: Path, imports: str, call: str) -> Any:
    (folder / "step.py").write_text(STEP.format(imports, call))
    return measure_step(f"{folder}/step.py:train", world_size=2, cluster="dgx-h100").measurement


@pytest.mark.parametrize(("call", "samples", "length"), [(WHOLE, 1, 256), (PACKED, 2, 128)])
def test_flash_attention_is_priced_and_keeps_no_scores(
    tmp_path: Path, call: str, samples: int, length: int
) -> None:
    row = traced(tmp_path, "from flash_attn import flash_attn_func, flash_attn_varlen_func", call)
    shape, ranks = (1, 4, length, 64), 2
    flops = ranks * samples * forward_flops(shape, shape, shape, call == WHOLE)
    assert row.flops["forward"] == pytest.approx(flops)
    assert not row.unpriced_operators


def test_sequences_of_several_lengths_do_not_meet() -> None:
    q = torch.randn(24, 2, 8, dtype=torch.float64)
    ends = torch.tensor([0, 7, 8, 24], dtype=torch.int32)
    o = _of_lengths(q, q, q, ends, ends, 16, 16, causal=True)
    for begin, end in ends.unfold(0, 2, 1).tolist():
        x = q[None, begin:end].transpose(1, 2)
        torch.testing.assert_close(
            o[None, begin:end].transpose(1, 2), scaled_dot_product_attention(x, x, x, is_causal=True)
        )
    with pytest.raises(NotImplementedError, match="window_size"):
        _whole(q[None], q[None], q[None], window_size=(4, 0))


def test_the_three_lines_of_the_message_give_a_missing_kernel_a_form(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No module named 'kernels_of_others'") as error:
        traced(tmp_path, "from kernels_of_others import f", "f(q)")
    lines = re.findall(r"\(\d\) (.*?)(?:;|$)", str(error.value))
    own = "def f_of_tensors(x: torch.Tensor) -> torch.Tensor:\n    return x.clone()\n"
    assert traced(tmp_path, own + "\n".join(lines), "f(q)").status == "ok"
