"""A user's step calls kernels of packages: launches of Triton kernels have a price, FlashAttention has a form
where it is not installed, and of others the message has three lines that give one."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from spbench import measure_step
from spbench.bench.errors import UserError
from spbench.impls import forward_flops
from spbench.impls.peers.flash_attn_stand_in import _of_lengths, _whole
from tests.grid import data

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


def step_of(folder: Path, text: str, world_size: int = 1) -> Any:
    (folder / "step.py").write_text(text)
    with pytest.MonkeyPatch.context() as patched:
        for name in [each for each in sys.modules if each.partition(".")[0] == "flash_attn"]:
            patched.delitem(sys.modules, name)  # which tests of peers put there
        return measure_step(f"{folder}/step.py:train", world_size=world_size, cluster="dgx-h100")


def traced(folder: Path, imports: str, call: str) -> Any:
    return step_of(folder, STEP.format(imports, call), 2).measurement


LAUNCHES, DELTA_RULE, LIGER = (data(__file__)[name] for name in ("LAUNCHES", "DELTA_RULE", "LIGER"))
FORMULA = "register_flop_formula(doubled_by_users.fn)(lambda x_ptr, n, **_: n)\n"


@pytest.mark.parametrize("formula", ["", FORMULA])
def test_a_users_triton_kernel_is_priced_by_bytes_or_a_formula(tmp_path: Path, formula: str) -> None:
    step = step_of(tmp_path, LAUNCHES.format(formula), 2)
    assert step.measurement.unpriced_operators == ({} if formula else {"doubled_by_users": 1})
    assert step.measurement.flops["forward"] == (2 * 1024 * 64 if formula else 0)
    program = step.classes.traced[0].trace.program
    assert program.nbytes[program.calls_of(["doubled_by_users"])].tolist() == [2 * 4 * 1024 * 64]


@pytest.mark.parametrize(
    ("name", "channels", "naive", "off"),
    [
        ("gated_delta_rule", "", "naive_chunk_gated_delta_rule", 0.03),
        ("kda", ", 128", "naive_chunk_kda", 0.06),
        ("simple_gla", "", "naive_chunk_simple_gla", 1e-9),
    ],
)
def test_kernels_of_fla_have_the_flops_of_its_naive_forms(
    tmp_path: Path, name: str, channels: str, naive: str, off: float
) -> None:
    """The kernels leave out the parts of the scores above the diagonal, and invert a triangle by products."""
    forms = pytest.importorskip(f"fla.ops.{name}.naive")
    given = "g=g" if name == "simple_gla" else "g, beta"
    row = step_of(tmp_path, DELTA_RULE.format(name, channels, given)).measurement
    q, g = torch.randn(1, 1024, 2, 128), -torch.rand(1, 1024, 2, *[128] * bool(channels))
    with FlopCounterMode(display=False) as counter:
        getattr(forms, naive)(q, q, q, *[g] if name == "simple_gla" else [g, torch.rand(1, 1024, 2)])
    assert row.flops["forward"] == pytest.approx(counter.get_total_flops(), rel=off)
    assert row.flops["all"] > 3 * row.flops["forward"]
    assert not row.unpriced_operators
    # fla compiles functions that are not called
    assert "eager code" not in [each["by"] for each in row.priced_by]


def test_kernels_of_liger_are_priced_and_its_loss_keeps_no_logits(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    step = step_of(tmp_path, LIGER)
    row, program = step.measurement, step.classes.traced[0].trace.program
    mlp, head = 2 * 512 * 256 * 1024, 2 * 512 * 256 * 4096
    # the loss computes its gradients in forward
    assert row.flops["forward"] == 3 * mlp + 3 * head
    assert row.flops["all"] == 3 * 3 * mlp + 3 * head
    assert not row.unpriced_operators
    assert program.nbytes[program.calls_of(["liger_cross_entropy_kernel"])].sum() >= 3 * 2 * 512 * 4096


def test_flash_attn_stands_in_for_files_that_the_step_imports(tmp_path: Path) -> None:
    (tmp_path / "attention_of_step.py").write_text("from flash_attn import flash_attn_func")
    row = traced(tmp_path, "from attention_of_step import flash_attn_func as f", "f(q, q, q)")
    assert row.flops["forward"] > 0


def test_lengths_that_a_tensor_tells_are_heeded_and_others_said(tmp_path: Path) -> None:
    """A tensor of written numbers keeps them; those that an operator draws are not known."""
    imports = "from flash_attn import flash_attn_varlen_func as f"
    call = "f(*[q[0]] * 3, cu_seqlens_q={0}, cu_seqlens_k={0}, max_seqlen_q=128, max_seqlen_k=128)"
    known, unknown = (
        traced(tmp_path, imports, call.format(ends))
        for ends in ("torch.tensor([0, 64, 128, 256])", "torch.randint(256, (4,))")
    )
    short, long = (forward_flops(*[(1, 4, n, 64)] * 3, False) for n in (64, 128))
    assert known.flops["forward"] == 2 * (2 * short + long)
    assert known.priced_by == []
    assert unknown.flops["forward"] == 2 * 2 * long
    assert unknown.priced_by[0]["work"] == "packed sequences"


@pytest.mark.parametrize(("call", "samples", "length"), [(WHOLE, 1, 256), (PACKED, 2, 128)])
def test_flash_attn_is_priced_without_scores(tmp_path: Path, call: str, samples: int, length: int) -> None:
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
