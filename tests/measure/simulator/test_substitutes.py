"""What is priced by something else than a rate of its own: kernels and links by hand, and words on them."""

from collections import Counter
from typing import Any, get_args

import pytest
import torch

from spbench.bench.measure.clusters.cluster import Calibration, Cluster, cluster_names, load_cluster
from spbench.bench.measure.clusters.kinds_of_work import without_own_rates
from spbench.bench.measure.clusters.rates import AttentionKernel
from spbench.bench.measure.engines.step_line import rates_of_step
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import KERNEL, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.substitutes import Substitute, kernel_substitutes
from spbench.bench.measure.trace.operator_prices import price_of
from spbench.bench.measure.trust.bands import priced_by_in_words
from spbench.bench.setting_values import stand_ins
from spbench.impls.kernels.grouped_matmul import GROUPED_MATMULS
from tests.measure.simulator.step_programs import cluster, of_links
from tests.measure.simulator.test_card_rates import figure, rate, with_card


def attention(length: int, size: int = 8, causal: bool = True, dtype: Any = torch.bfloat16) -> Program:
    """A program of one forward call of one head."""
    q = torch.empty(1, 1, length, size, dtype=dtype)
    b = ProgramBuilder((1, 1, 1, 1))
    price = price_of(torch.ops.spbench.flash_attention.default)
    b.add_kernel((KERNEL, b.named(price.name), *price.of((q, q, q, 1.0, causal), {}, None)))
    return b.program()


def of_kernels(on: Cluster, kernel: str, program: Program) -> list[tuple[str, str, str]]:
    found = kernel_substitutes(Costs(on, Calibration(), attention=kernel), program)
    return [tuple(each) for each, events in found if len(events)]


def card(*rates: dict[str, Any]) -> Cluster:
    kernels = {"flash_attention_2": [rate(100.0)], "triton": list(rates)}
    return with_card(attention={"default": "flash_attention_2", "kernels": kernels})


def test_a_kernel_without_a_rate_counts_as_matrix_products_and_is_named() -> None:
    by_matmuls = [("attention by triton", "matmuls", "substituted")]
    by_ratio = "flash_attention_2's, by the ratio of both on NVIDIA A100 SXM4 80 GB"
    carried = [("forward attention by triton", by_ratio, "transferred")]
    assert of_kernels(card(), "triton", attention(16)) == carried
    assert of_kernels(with_card(), "triton", attention(16)) == by_matmuls
    assert of_kernels(with_card(), "flash", attention(16)) == [("attention", *by_matmuls[0][1:])]
    assert of_kernels(card(rate(10.0)), "triton", attention(16)) == []
    # one share of the peak for all kernels is a figure of attention
    assert of_kernels(with_card(attention_efficiency=figure(0.5)), "triton", attention(16)) == []
    # rates are of half precisions
    single = attention(16, dtype=torch.float32)
    assert of_kernels(card(rate(10.0)), "triton", single) == by_matmuls


def test_the_rate_of_another_card_or_of_other_calls_is_named() -> None:
    work = "forward attention by triton"
    other = rate(10.0) | {"limit_flops_per_s": figure(10.0) | {"substitute": "another card's"}}
    assert of_kernels(card(other), "triton", attention(16)) == [(work, "another card's", "transferred")]
    far = rate(10.0, measured={32: 5.0, 64: 7.0})
    assert of_kernels(card(far), "triton", attention(64)) == []
    assert of_kernels(card(far), "triton", attention(65)) == [
        (work, "its rate up to 64 tokens", "extrapolated")
    ]
    assert of_kernels(card(far), "triton", attention(31)) == [
        (work, "its rate from 32 tokens", "extrapolated")
    ]
    unlike = of_kernels(card(rate(10.0)), "triton", attention(16, size=4, causal=False))
    assert unlike == [(work, "its rate with a causal mask, at head size 8", "extrapolated")]


def linked(devices: int, *, substitute: str = "", **collectives: Any) -> Cluster:
    document = cluster(devices=devices).model_dump()
    document["node_link"]["bandwidth_bytes_per_s"]["substitute"] = substitute
    document["node_link"]["collectives"] = collectives
    document["collective_model"] = "measured" if collectives else "ring"
    return Cluster.model_validate(document)


def bus(ranks: int | None = None, substitute: str = "") -> dict[str, Any]:
    own = figure(1.0) | {"substitute": substitute}
    return {"ranks": ranks, "latency_s": figure(0.0), "bandwidth_bytes_per_s": own}


def test_links_that_are_the_datasheets_are_named_with_what_they_take() -> None:
    work = "all_to_all intra-node"
    by_datasheet = of_links(linked(4, substitute="the datasheet"), 4)
    assert by_datasheet == {(work, "the datasheet", "substituted"): pytest.approx(6.0)}
    assert [*of_links(linked(4), 4)] == [(work, "the bandwidth of a send", "extrapolated")]
    assert of_links(linked(4, all_to_all=[bus(4)]), 4) == {}
    other = linked(4, all_to_all=[bus(4, "another machine's")])
    assert [*of_links(other, 4)] == [(work, "another machine's", "substituted")]
    assert [*of_links(linked(4, all_to_all=[bus(2)]), 4)] == [(work, "its rate of 2 ranks", "extrapolated")]
    by_any = of_links(linked(4, any=[bus()]), 4)
    assert [*by_any] == [(work, "the rate of other collectives", "extrapolated")]
    by_datasheet = of_links(linked(4, substitute="the datasheet"), 4, sends=True)
    assert by_datasheet == {("send intra-node", "the datasheet", "substituted"): pytest.approx(8.0)}
    assert of_links(linked(4), 4, sends=True) == {}
    # two nodes: within each, and between them
    both = of_links(linked(2, substitute="the datasheet"), 4)
    assert Counter(grade for _, _, grade in both) == {"substituted": 1, "extrapolated": 1}


def test_the_class_of_a_time_is_that_of_its_worst_price_that_counts() -> None:
    def of(**shares: float) -> str:
        priced_by = [{"grade": grade, "share": share} for grade, share in shares.items()]
        return rates_of_step(load_cluster("a100-sxm-80gb"), "bf16", ("tnl-1b", "lasp"), priced_by)

    assert of() == of(transferred=0.04, extrapolated=0.04) == "sourced"
    assert of(extrapolated=0.5) == "extrapolated"
    assert of(extrapolated=0.5, transferred=0.06) == "transferred"
    # work without any rate may take many times as long, so that a little of it counts
    assert of(extrapolated=0.5, transferred=0.5, substituted=0.011) == "substituted"
    named = [each.price for each in stand_ins("torchtitan", "zero3", {"tp": 2, "nodes": 2})]
    names = ["torchtitan's TP", "torchtitan over nodes"]
    assert [each["work"] for each in named] == names
    priced_by = [*named, {"grade": "substituted", "share": 0.5}]
    sourced = rates_of_step(load_cluster("a100-sxm-80gb"), "bf16", ("tnl-1b", "lasp"), priced_by)
    assert sourced == f"{names[0]} priced as Megatron's"
    assert not [*stand_ins("", "zero3", {"ep": 8, "nodes": 2}, "the datasheet")]
    assert [each.work for each in stand_ins("", "zero3", {"nodes": 2}, "InfiniBand")] == ["EFA"]
    # a scalar has taken up what its own program lacks, and that of no other program
    fitted, missing = load_cluster("a100-lasp"), [{"grade": "substituted", "share": 1.0}]
    assert rates_of_step(fitted, "bf16", ("tnl-1b", "lasp"), missing) == "fitted"
    assert rates_of_step(fitted, "bf16", ("tnl-1b", "ulysses"), missing) == "fitted elsewhere"
    assert rates_of_step(fitted, "bf16", ("linear-llama3-1b", "lasp"), missing) == "fitted elsewhere"


def test_prices_in_words_are_those_of_the_largest_shares() -> None:
    def measured(share: float, work: str, grade: str = "substituted") -> dict[str, Any]:
        return {"priced_by": [Substitute(work, "matmuls", grade)._asdict() | {"share": share}]}  # type: ignore[arg-type]

    some = [measured(0.2, "a"), measured(0.5, "a"), measured(0.1, "b", "extrapolated"), {}]
    assert priced_by_in_words(some) == (
        "no rate of its own: a (up to 50%): matmuls. Extrapolated: b (up to 10%): matmuls"
    )
    many = [measured(0.1 * n, f"w{n}") for n in range(1, 6)]
    assert priced_by_in_words(many).endswith("w3 (up to 30%): matmuls; 2 more")
    assert priced_by_in_words([{}]) == ""


def test_another_value_of_a_figure_drops_what_was_said_of_the_one_before(tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    base = "extends: dgx-h100-datasheet\n"
    path.write_text(base)
    assert load_cluster(str(path)).network.bandwidth_bytes_per_s.substitute == "the datasheet"
    path.write_text(f"{base}network: {{bandwidth_bytes_per_s: {{value: 1.0e+9, source: measured here}}}}\n")
    network = load_cluster(str(path)).network
    assert (network.bandwidth_bytes_per_s.substitute, network.bandwidth_bytes_per_s.note) == ("", "")
    assert network.latency_s.note  # of which nothing is said


@pytest.mark.parametrize("name", cluster_names())
def test_no_kernel_of_a_packaged_cluster_is_priced_by_another_s_rate_unsaid(name: str) -> None:
    on = load_cluster(name)
    device, peaks = on.device, {str(k) for k, peak in on.device.peak_flops_per_s.items() if peak.value}
    for kernel in get_args(AttentionKernel) if "bf16" in peaks else ():
        rates = [] if device.attention is None else device.attention.kernels.get(kernel, [])
        default = device.attention is not None and kernel == device.attention.default
        own = any(not each.limit_flops_per_s.substitute for each in rates)
        own |= default and device.attention_efficiency.value is not None
        assert own or of_kernels(on, kernel, attention(4096, 128)), kernel
    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    for dtype in peaks & {*dtypes}:
        said = of_kernels(on, "flash", matmul(dtypes[dtype]))
        assert said or dtype in {*(device.matmul or {})} or device.compute_efficiency.value, dtype


def matmul(dtype: torch.dtype, name: str = "") -> Program:
    a, b = torch.empty(64, 64, dtype=dtype), ProgramBuilder((1, 1, 1, 1))
    price = price_of(torch.ops.aten.mm.default)
    b.add_kernel((KERNEL, b.named(name or price.name), *price.of((a, a), {}, None)))
    return b.program()


def test_other_precisions_experts_and_operators_by_another_card_are_named() -> None:
    whose, own = {"substitute": "a B200's"}, {"share": figure(0.5)}
    on = with_card(
        matmul={"bf16": own},
        grouped_matmul={"bf16": {"share": figure(0.5) | whose}},
        compute_efficiency=figure(0.4),
        operators={"add": {"value": [[8, 1.0]], "source": "s"} | whose},
        memory_efficiency=figure(0.9),
    )
    other = [("fp32 matmuls", "the share of other precisions", "transferred")]
    assert of_kernels(on, "flash", matmul(torch.float32)) == other
    grouped = [("grouped bf16 matmuls", "a B200's", "transferred")]
    assert of_kernels(on, "flash", matmul(torch.bfloat16, next(iter(GROUPED_MATMULS)))) == grouped
    a, b = torch.empty(64), ProgramBuilder((1, 1, 1, 1))
    b.add_kernel((KERNEL, b.named("add"), *price_of(torch.ops.aten.add.Tensor).of((a, a), {}, None)))
    assert of_kernels(on, "flash", b.program()) == [("memory, by operator", "a B200's", "transferred")]


def test_what_packaged_clusters_lack_a_rate_of() -> None:
    assert without_own_rates(load_cluster("dgx-h100")) == ["triton"]
    assert {"intra-node links", "flash_attention_2"} < {*without_own_rates(load_cluster("a100-pcie-80gb"))}
    assert "attention" in without_own_rates(load_cluster("l40s"))
    assert "intra-node links" not in without_own_rates(load_cluster("l40s"))
    assert {"matmuls", "memory"} < {*without_own_rates(load_cluster("b300-sxm"))}
    assert without_own_rates(load_cluster("dgx-a100-datasheet")) == ["all, by the datasheet alone"]
    assert without_own_rates(load_cluster("local")) == []
