"""Reading logs: what each kind says, and what is refused."""

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.calibrate.from_torch_profiler import ATTENTION
from spbench.bench.tools.calibrate.log_findings import (
    Findings,
    LogFile,
    TimedCollective,
    TimedMatmul,
    findings_of,
)
from tests.grid import data
from tests.tools.calibrate.logs import FACTORS, Trace, flash_log, mamf_log, nccl_log, points_of

SAMPLES = Path(__file__).parent / "samples"


def of_text(tmp_path: Path, text: str, name: str = "a.log") -> Findings:
    path = tmp_path / name
    path.write_text(text)
    return findings_of(path)


def test_rows_of_nccl_tests() -> None:
    found = findings_of(SAMPLES / "all_reduce_perf.log")
    assert (found.about, found.card) == ("all_reduce_perf of nccl-tests", "NVIDIA H100 80GB HBM3")
    # its first row, out of place, and its last
    assert found.collectives[0] == TimedCollective("all_reduce", 8, 1, 8, pytest.approx(27.55e-6))
    assert found.collectives[-1].nbytes == 2**30
    assert len(found.collectives) == 10


def test_the_file_names_a_collective_that_the_log_does_not() -> None:
    found = findings_of(SAMPLES / "all_gather_perf_2_nodes.log")
    assert {(c.collective, c.ranks, c.nodes) for c in found.collectives} == {("all_gather", 16, 2)}


def test_a_file_of_several_logs(tmp_path: Path) -> None:
    text = "".join(nccl_log(program, 1e-5, 1e11) for program in (*FACTORS, "all_reduce_perf"))
    text += nccl_log("all_reduce_perf", 1e-5, 1e11).replace("all_reduce_perf", "broadcast_perf")
    found = of_text(tmp_path, text)
    counts = [c.collective for c in found.collectives]
    assert [counts.count(kind) for kind in ("all_reduce", "all_to_all", "send")] == [20, 10, 10]
    assert len(counts) == 60
    assert ["broadcast_perf is passed over" in remark for remark in found.remarks] == [True]


def test_a_log_that_was_cut_off_is_told(tmp_path: Path) -> None:
    whole = nccl_log("sendrecv_perf", 1e-5, 1e11)
    assert of_text(tmp_path, whole).remarks == []
    (remark,) = of_text(tmp_path, whole[: whole.index("  16777216 ")]).remarks
    assert "has no end" in remark


#: a product of version 2, of version 1, and of version 4 with its columns
SHAPES = (
    "     1 |  700.1(mean)  700.2(median)  700.3(max) @ 1024x2048x4096 | best:  9.9(mean) 9.9(median) TFLOPS",
    "     1 |  700.2 TFLOPS @ 1024x2048x4096       | best:  999.9 TFLOPS @ 1x1x1 (MxNxK)",
    "     #  MxNxK                mean median    max   best     W   MHz\n"
    "    18  1024x2048x4096      700.1  700.2  700.3  700.1   506  1980  <- best mean",
)
BEST = data(__file__)["BEST"]


@pytest.mark.parametrize("text", [*SHAPES, *BEST])
def test_shapes_of_mamf_finder(tmp_path: Path, text: str) -> None:
    found = of_text(tmp_path, f"python mamf-finder.py\n** Dtype: torch.float16\n{text}\n")
    (product,) = found.matmuls
    assert product.precision == "fp16"
    assert product.flops == 2 * 1024 * 2048 * 4096
    assert product.nbytes == 2 * (1024 * 4096 + 4096 * 2048 + 1024 * 2048)
    assert product.flops / product.seconds == pytest.approx(700.2e12)
    assert found.about == ("mamf-finder, the best of 79 shapes" if text in BEST else "mamf-finder")


def test_the_best_is_not_counted_beside_the_shapes() -> None:
    found = findings_of(SAMPLES / "mamf_finder.txt")
    assert (len(found.matmuls), found.card) == (7, "NVIDIA H100 80GB HBM3")


def test_speeds_of_flash_attention(tmp_path: Path) -> None:
    text = flash_log(400e12, 600.0).replace("Flash2", "Triton", 1)
    found = of_text(tmp_path, text).attention
    # 400 / (1 + 600 / 512) = 184.17, backward 0.8 of it
    first = [(s.kernel, s.head_size, s.mask, s.direction, s.length, s.flops_per_s) for s in found[:2]]
    assert first == [
        ("triton", 128, "causal", "forward", 512, pytest.approx(184.17e12)),
        ("triton", 128, "causal", "backward", 512, pytest.approx(147.34e12)),
    ]
    assert {s.kernel for s in found[2:]} == {"flash_attention_2"}
    assert len(found) == 12


def traced(tmp_path: Path, trace: Trace) -> Findings:
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(json.dumps(trace.content()).encode()))
    return findings_of(path)


def test_products_of_a_trace(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch("aten::mm", [(64, 32), (32, 16)], 2.0)
    trace.launch("aten::addmm", [(16,), (64, 32), (32, 16)], 3.0, dtype="float")
    trace.launch("aten::bmm", [(4, 64, 32), (4, 32, 16)], 4.0, dtype="double")
    trace.launch("aten::mm", [(64, 32), (32, 16)], 1.0, dtype="float", kernel="sm90_gemm_f32f32_tf32f32")
    trace.launch("aten::mm", [(64, 32), (32, 16)], 1.0, dtype="c10::Float8_e4m3fn")
    elements = 64 * 32 + 32 * 16 + 64 * 16
    assert traced(tmp_path, trace).matmuls == [
        TimedMatmul("bf16", 2 * 64 * 32 * 16, 2 * elements, 2e-6),
        TimedMatmul("fp32", 2 * 64 * 32 * 16, 4 * elements, 3e-6),
        TimedMatmul("fp64", 8 * 64 * 32 * 16, 32 * elements, 4e-6),
    ]


def test_an_operator_has_the_time_of_all_its_kernels(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch("aten::mm", [(64, 32), (32, 16)], 2.0)
    second = {**trace.events[1], "ts": 2000.0, "dur": 5.0}
    trace.events.append(second)
    assert [p.seconds for p in traced(tmp_path, trace).matmuls] == [7e-6]


def inputs(causal: int, value: str, **further: str) -> list[str]:
    """Inputs as a trace writes them, of which that in the place ``causal`` is ``value``."""
    values = [""] * 20
    values[causal] = value
    for place, text in further.items():
        values[int(place[1:])] = text
    return values


def test_attention_of_a_trace(tmp_path: Path) -> None:
    # [B, L, H, A] in one, [B, H, L, A] in the other
    trace, packed = Trace(), [(2, 512, 8, 64)] * 4
    trace.launch("aten::_flash_attention_forward", packed, 10.0, Concrete_Inputs=inputs(8, "True"))
    trace.launch("aten::_flash_attention_backward", packed, 50.0, Concrete_Inputs=inputs(11, "False"))
    heads_first = [(2, 8, 512, 64)] * 3
    trace.launch("aten::_cudnn_attention_forward", heads_first, 20.0, Concrete_Inputs=inputs(10, "False"))
    found = [
        (s.kernel, s.mask, s.direction, s.length, s.head_size) for s in traced(tmp_path, trace).attention
    ]
    assert found == [
        ("flash_attention_2", "causal", "forward", 512, 64),
        ("flash_attention_2", "whole", "backward", 512, 64),
        ("cudnn", "whole", "forward", 512, 64),
    ]
    whole = 4 * 2 * 8 * 512 * 512 * 64
    speeds = [s.flops_per_s for s in traced(tmp_path, trace).attention]
    assert speeds == pytest.approx([whole / 2 / 10e-6, 2.5 * whole / 50e-6, whole / 20e-6])


@pytest.mark.parametrize(
    ("tensors", "values", "dtype"),
    [
        ([(512, 8, 64)] * 3, inputs(8, "False"), "c10::Half"),  # packed sequences
        ([(2, 512, 8, 64), *[(2, 256, 8, 64)] * 2], inputs(8, "True"), "c10::Half"),  # causal and no square
        ([(2, 512, 8, 64)] * 3, inputs(8, "False", _11="128"), "c10::Half"),  # a window
        ([(2, 512, 8, 64)] * 3, inputs(8, "False"), "float"),
    ],
)
def test_attention_whose_flops_are_not_known(
    tmp_path: Path, tensors: list[tuple[int, ...]], values: list[str], dtype: str
) -> None:
    trace = Trace()
    trace.launch("aten::_flash_attention_forward", tensors, 10.0, dtype=dtype, Concrete_Inputs=values)
    assert traced(tmp_path, trace).attention == []


def test_the_places_of_torchs_inputs() -> None:
    import torch

    for name, operator in ATTENTION.items():
        package, operation = name.split("::")
        if package != "aten":
            continue
        arguments = getattr(torch.ops.aten, operation).default._schema.arguments
        names = [argument.name for argument in arguments]
        assert names[operator.query : operator.query + 2] == ["query", "key"]
        assert names[operator.causal] == "is_causal"
        assert operator.window is None or names[operator.window] == "window_size_left"


def test_passes_over_memory(tmp_path: Path) -> None:
    trace = Trace()
    trace.launch("aten::add", [(64, 32), (32,)], 1.0)
    trace.launch("aten::mul_", [(64, 32), (64, 32)], 2.0, dtype="float")
    trace.launch("aten::gelu", [(64, 32)], 3.0)
    trace.launch("aten::mul", [(64, 32)] * 2, 5.0, Input_type=["c10::BFloat16", "float"])
    trace.launch("aten::sum", [(64, 32)], 3.0)
    trace.launch("aten::add", [(64, 32), (64, 32)], 4.0, Input_Strides=[[32, 1], [0, 1]])
    size = 64 * 32
    assert [(p.nbytes, p.seconds) for p in traced(tmp_path, trace).passes] == [
        (2 * (size + 32 + size), 1e-6),
        (4 * (size + size + size), 2e-6),
        (2 * (size + size), 3e-6),
        ((2 + 4 + 4) * size, 5e-6),
    ]


def test_gaps_of_the_busiest_stream(tmp_path: Path) -> None:
    trace = Trace(gap_us=1.5)
    for _ in range(3):
        trace.launch("aten::mm", [(64, 32), (32, 16)], 2.0)
    other = {"ph": "X", "cat": "kernel", "name": "nccl", "pid": 0, "tid": 9, "ts": 0.0, "dur": 1.0}
    trace.events.append({**other, "args": {"stream": 9}})
    assert traced(tmp_path, trace).launch_gaps_s == pytest.approx([1.5e-6, 1.5e-6])


def test_a_trace_without_shapes_has_gaps(tmp_path: Path) -> None:
    trace = Trace()
    for _ in range(3):
        trace.launch("aten::mm", [(64, 32), (32, 16)], 2.0)
    for event in trace.events:
        event["args"].pop("Input Dims", None)
    found = traced(tmp_path, trace)
    assert (found.matmuls, len(found.launch_gaps_s)) == ([], 2)
    assert "profile with record_shapes=True" in found.remarks[0]


NCCL = nccl_log("all_reduce_perf", 1e-5, 1e11)
FLASH = flash_log(1e14, 256.0)
MAMF = mamf_log(1e15, 1e12, [(512, 512, 512)])
TRACE = Trace()
TRACE.launch("aten::mm", [(64, 32), (32, 16)], 2.0)


def trace_with(**changes: object) -> str:
    """The trace of one product, whose first event has these values."""
    content = TRACE.content()
    return json.dumps({**content, "traceEvents": [{**TRACE.events[0], **changes}, *TRACE.events[1:]]})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is empty"),
        ("a,b\n1,2\n", "(choices: flash-attention, mamf-finder, nccl-tests, torch-profiler)"),
        ('{"rows": []}', "no kind of log"),
        (NCCL + flash_log(1e14, 1.0), "is a log of flash-attention and of nccl-tests"),
        (NCCL[: NCCL.index("           8 ")], "without rows; was the run cut off?"),
        (NCCL.replace("all_reduce_perf", ""), "does not name its collective"),
        (NCCL.replace("#  Rank", "# rank"), "no lines '# Rank 0"),
        (nccl_log("all_reduce_perf", 1e-5, 1e11, ranks=1), "on one rank moves nothing"),
        (NCCL.replace("on node-0 device  7", "on node-1 device  7"), "hosts have different numbers of ranks"),
        (NCCL.replace("#  Rank  6", "#  Lost  6"), "7 lines of ranks, of which the last is 7"),
        (NCCL.replace("#  Rank  7", "#  Lost  7"), "busbw over algbw is 1.75, but of 7 ranks, as listed,"),
        (NCCL.replace("    0 ", "    3 ", 1), "line 17: all_reduce_perf of 8 bytes: 3 wrong results"),
        (NCCL.replace("1073741824 ", "2147483648 "), "contradict each other"),
        (NCCL.replace(" 10.57 ", " 10..7 ", 1), "line 21: a row of nccl-tests that is not whole"),
        (NCCL.replace(" 10.57 ", f" 1{'0' * 400} ", 1), "line 21: a row of nccl-tests that is not whole"),
        (NCCL.replace("values : 0 OK", "values : 3 FAILED"), "out of bounds values: 3 FAILED; do not trust"),
        (NCCL.replace("(GB/s)", "(MB/s)"), "line 16: columns in (MB/s), not in us and GB/s"),
        (NCCL.replace("(us)", "(ms)"), "line 16: columns in (ms), not in us and GB/s"),
        (NCCL.replace("HBM3", "HBM2", 1), "ranks on several cards, NVIDIA H100 80GB HBM2 and NVIDIA H100"),
        (FLASH.replace("fwd: ", "fwd: -", 1), "line 2: 'fwd: -66.67 TFLOPs/s' is no speed in TFLOPs/s"),
        (FLASH.replace(" TFLOPs/s", " GFLOPs/s", 1), "line 2: 'fwd: 66.67 GFLOPs/s' is no speed in TFLOPs/s"),
        (re.sub(r" ([0-9.]+)\(median", r"-\1(median", MAMF), "TFLOPS cannot be"),
        (trace_with().replace('"dur": 2.0', '"dur": -2.0'), "1 events of a GPU have a duration below 0"),
        ("** Dtype: bfloat16\nTried 0 shapes => the best outcomes were:", "without a shape and its TFLOPS"),
        (mamf_log(1e15, 1e12, [(1, 1, 1)]).replace("** Dtype", "Dtype"), "must name one dtype"),
        (mamf_log(1e15, 1e12, [(1, 1, 1)], "float8_e4m3fn"), "matmuls of float8_e4m3fn have no place"),
        ("### causal=True, headdim=64, batch_size=32, seqlen=512 ###\n", "was it cut off?"),
        (trace_with()[:-40], "damaged JSON of a trace"),
        (trace_with(cat="python").replace('"kernel"', '"python"'), "without kernels of a GPU"),
        (trace_with(args={"External id": 0, "Input Dims": [[6, 3]], "Input type": ["float"]}), "IndexError"),
        (trace_with(args={"External id": 0, "Input Dims": [[2**63]], "Input type": ["float"]}), "64 bits"),
        ('{"traceEvents": ' + "[" * 9999, "damaged JSON of a trace"),
        ('{"traceEvents": 3}', "a trace with events of another form"),
    ],
    ids=lambda value: value.split("\n")[0][:40],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UserError) as raised:
        of_text(tmp_path, text)
    assert complaint in str(raised.value)
    assert str(raised.value).startswith(f"{tmp_path}/a.log: ")


@pytest.mark.parametrize("sample", sorted(SAMPLES.iterdir()), ids=lambda path: path.name)
def test_a_sample_cut_off_anywhere_is_read_or_refused(tmp_path: Path, sample: Path) -> None:
    whole, cut, most = sample.read_bytes(), tmp_path / sample.name, points_of(findings_of(sample))
    assert most
    for part in range(1, 20):
        cut.write_bytes(whole[: len(whole) * part // 20])
        with suppress(UserError):  # any other error is a mistake
            assert points_of(findings_of(cut)) <= most


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    assert LogFile(tmp_path, b"\xff").text == "\ufffd"
    (tmp_path / "a.log").write_bytes(bytes(range(256)))
    with pytest.raises(UserError, match="no kind of log"):
        findings_of(tmp_path / "a.log")
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(trace_with().encode())[:-20])
    with pytest.raises(UserError, match="damaged gzip"):
        findings_of(path)
