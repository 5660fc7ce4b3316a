"""Products by shape and attention by kernel, against seconds worked out by hand. FlashAttention-2 on calls
unlike those that were measured.
What is priced by something else than a rate of its own: kernels and links by hand, and words on them."""

from collections import Counter
from typing import Any, get_args

import pytest
import torch

from spbench.bench.measure.clusters.cluster import Calibration, Cluster, cluster_names, load_cluster
from spbench.bench.measure.clusters.rates import AttentionKernel
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.step_line import rates_of_step
from spbench.bench.measure.simulator import table_prices as grid
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.program import Category, Kind, Program
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.substitutes import Substitute, kernel_substitutes
from spbench.bench.measure.trace.operator_prices import OPERATORS, price_of
from spbench.bench.measure.trust.bands import priced_by_in_words
from spbench.bench.setting_values import stand_ins
from spbench.bench.tools.run.kinds_of_work import without_own_rates
from spbench.impls.kernels.gated_delta_operators import BLOCK
from spbench.impls.kernels.grouped_matmul import GROUPED_MATMULS
from tests.cells import make_cell
from tests.measure.simulator.step_programs import cluster, of_links
from tests.measure.simulator.test_cost_forms import changed


def figure(value: float | None) -> dict[str, Any]:
    return {"value": value, "source": "made up"}


def with_card(**device: Any) -> Cluster:
    """A cluster of 1 FLOP a second in float32 and 1000 in bfloat16, with these figures of its card."""
    document = cluster().model_dump()
    document["device"]["peak_flops_per_s"]["bf16"] = figure(1000.0)
    document["device"] |= device
    return Cluster.model_validate(document)


def rate(limit: float, half: float | None = None, **of: Any) -> dict[str, Any]:
    return {
        "head_size": 8,
        "mask": "causal",
        "limit_flops_per_s": figure(limit),
        "half_length": figure(half),
        **of,
    }


ATTENTION_RATES = {
    "default": "flash_attention_2",
    "kernels": {
        "flash_attention_1": [rate(10.0)],
        "flash_attention_2": [
            rate(100.0, 4.0, direction="forward"),
            rate(50.0, 4.0, direction="backward"),
            rate(200.0, direction="forward", mask="whole"),
            rate(25.0, direction="forward", head_size=2),
            rate(70.0, direction="backward", head_size=2),
        ],
    },
}


def attention_seconds(
    on: Cluster,
    kernel: str,
    queries: int,
    keys: int,
    causal: bool,
    size: int = 8,
    dtype: Any = torch.bfloat16,
    calibration: Calibration | None = None,
) -> list[float]:
    """Seconds of one head's forward and backward kernel, priced as a step's operators are."""
    q, k = torch.empty(1, 1, queries, size, dtype=dtype), torch.empty(1, 1, keys, size, dtype=dtype)
    lse = torch.empty(1, 1, queries)
    b = ProgramBuilder((1, 1, 1, 1))
    for func, args in (
        (torch.ops.spbench.flash_attention.default, (q, k, k, 1.0, causal)),
        (torch.ops.spbench.flash_attention_backward.default, (q, q, k, k, q, lse, 1.0, causal)),
    ):
        price = price_of(func)
        b.add_kernel((Kind.KERNEL, b.named(price.name), *price.of(args, {}, None)))
    return Costs(on, calibration or Calibration(), attention=kernel).kernels(b.program()).tolist()


def test_a_product_by_shape_pays_for_its_operands() -> None:
    """In its precision alone: FLOPs / (peak x share) + bytes / bandwidth."""
    matmuls = {"bf16": {"share": figure(0.5), "bandwidth_bytes_per_s": figure(4.0)}}
    b = ProgramBuilder((1, 1, 1, 1))
    for precision in ("bf16", "fp32"):
        b.kernel("mm", flops=3000, nbytes=8, precision=precision, category=Category.MATMUL)
    b.kernel("add", nbytes=8, precision="bf16")
    costs = Costs(with_card(matmul=matmuls), Calibration(compute_efficiency=0.5))
    assert costs.kernels(b.program()).tolist() == pytest.approx([3000 / 250 + 2, 6000.0, 8e-30])


def test_one_share_of_products_takes_the_place_of_the_cards() -> None:
    """In its precision, for attention too where nothing is known of that."""
    card = with_card(matmul={"bf16": {"share": figure(0.5)}}, compute_efficiency=figure(0.25))
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("mm", flops=1000, nbytes=8, precision="bf16", category=Category.MATMUL)
    b.kernel("flash", flops=1000, precision="bf16", category=Category.ATTENTION)
    b.kernel("mm", flops=1, category=Category.MATMUL)
    assert Costs(card, Calibration()).kernels(b.program()).tolist() == [2, 2, 4]


def test_a_step_keeps_a_part_of_the_rates_of_calls_alone() -> None:
    """A grouped matmul takes longer by it as a whole, operands too; attention by that of its direction."""
    grouped = {"share": figure(0.5), "bandwidth_bytes_per_s": figure(4.0), "sustained": figure(0.8)}
    b = ProgramBuilder((1, 1, 1, 1))
    b.kernel("te_grouped_mm", flops=3000, nbytes=8, precision="bf16", category=Category.MATMUL)
    costs = Costs(with_card(grouped_matmul={"bf16": grouped}), Calibration())
    assert costs.kernels(b.program()).tolist() == pytest.approx([(3000 / 500 + 2) / 0.8])
    rates = [
        rate(100.0, 4.0, direction="forward", sustained=figure(0.8)),
        rate(50.0, 4.0, direction="backward"),
    ]
    on = with_card(attention={"default": "flash_attention_2", "kernels": {"flash_attention_2": rates}})
    assert attention_seconds(on, "flash", 4, 4, True) == pytest.approx(
        [10 * 8 * 4 / 50 / 0.8, 10 * 8 * 10 / 25]
    )


def test_attention_by_direction_and_length() -> None:
    """Causal, 4 positions are half of the limit: 4 (4 + 1) / 2 pairs of 8 features, 2 matmuls forward and 5
    backward of 2 FLOPs each."""
    on = with_card(attention=ATTENTION_RATES)
    forward, backward = attention_seconds(on, "flash", 4, 4, True)
    assert (forward, backward) == (10 * 8 * 4 / 50, 10 * 8 * 10 / 25)
    forward, backward = attention_seconds(on, "flash", 12, 12, True)
    assert (forward, backward) == pytest.approx((78 * 8 * 4 / 75, 78 * 8 * 10 / 37.5))


def test_attention_without_a_mask_and_of_another_head_size() -> None:
    """A backward without a mask has no rate of its own: that of the same direction counts, at the shorter of
    queries and keys; a head of 3 features is nearest to one of 2, and both run as one of 32."""
    on = with_card(attention=ATTENTION_RATES)
    assert attention_seconds(on, "flash", 4, 6, False) == [24 * 8 * 4 / 200, 24 * 8 * 10 / 25]
    assert attention_seconds(on, "flash", 6, 4, False) == [24 * 8 * 4 / 200, 24 * 8 * 10 / 25]
    assert attention_seconds(on, "flash", 4, 4, True, size=3) == pytest.approx(
        [10 * 3 * 4 / (25 * 3 / 2), 10 * 3 * 10 / (70 * 3 / 2)]
    )


def test_a_kernel_has_rates_of_its_own_or_those_of_all_attention() -> None:
    on = with_card(attention=ATTENTION_RATES, attention_efficiency=figure(0.5))
    assert attention_seconds(on, "flash_attention_1", 4, 4, True) == [320 / 10, 800 / 10]
    assert attention_seconds(on, "flash", 4, 4, True, dtype=torch.float32) == [320 / 0.5, 800 / 0.5]
    # no card has both kernels' rates, so that the share of the peak counts
    rates = {"default": "flash_attention_1", "kernels": {"flash_attention_1": [rate(10.0)]}}
    on = with_card(attention=rates, attention_efficiency=figure(0.5))
    assert attention_seconds(on, "flash_attention_4", 4, 4, True) == [320 / 500, 800 / 500]


def test_the_models_option_names_the_kernel() -> None:
    """Which changes the time of a step, and what FlashAttention-2 holds inside its backward."""
    made = {}
    for kernel in ("flash", "flash_attention_2", "flash_attention_1"):
        options = {"attention": kernel}
        cell = make_cell("causal-transformer-tiny", "ulysses", {"sp": 2}, 2, 16, model_options=options)
        traced = virtual.trace_classes(cell, events=True)
        found = traced.simulator(with_card(attention=ATTENTION_RATES))()
        made[kernel] = (traced.traces[0].measurement(None).peak_memory_bytes, found.step_time_s)
    assert made["flash"][0] < made["flash_attention_2"][0]
    assert made["flash"][1] == made["flash_attention_2"][1]
    assert made["flash_attention_1"][0] == made["flash"][0]
    assert made["flash_attention_1"][1] > made["flash"][1]


def test_operators_take_what_was_measured_of_them() -> None:
    times = {"value": [[100.0, 5.0], [200.0, 7.0]], "source": "made up"}
    on = changed(cluster(memory=10), "device.operators", {"gelu": times})
    b = ProgramBuilder((1, 1, 1, 1))
    for nbytes in (10, 150, 400):
        b.kernel("gelu", nbytes=nbytes)
    b.kernel("other", nbytes=400)
    # as the smallest, on the line between, twice the largest; the other by its bytes
    assert Costs(on, Calibration()).kernels(b.program()).tolist() == [5.0, 6.0, 14.0, 40.0]


def test_a_scan_takes_no_less_than_its_steps_one_after_another() -> None:
    """3 heads of documents of 64, 64 and 2 blocks have the steps of 7 recurrences of 64. 2 run at once."""
    k, sums = torch.empty(1, 130 * BLOCK, 1, 2, device="meta"), torch.empty(1, 130 * BLOCK, 3, device="meta")
    b = ProgramBuilder((1, 1, 1, 1))
    for starts in ([64 * BLOCK, 128 * BLOCK], []):
        price = price_of(torch.ops.spbench.gated_delta_states.default)
        of_call = price.of((k, k, k.new_empty(1, 130 * BLOCK, 3, 2), sums, None, starts), {}, None)
        b.add_kernel((Kind.KERNEL, b.named(price.name), *of_call))
    steps = {"gated_delta_states": {"value": [[2.0, 1e4]], "source": "made up", "substitute": "a friend's"}}
    on = changed(cluster(memory=1e9), "device.scans", steps)
    assert Costs(on, Calibration()).kernels(b.program()).tolist() == [64e4 * 7 / 2, 130e4 * 3 / 2]
    for card, *by in (on, "a friend's", "transferred"), (cluster(), "their bytes alone", "substituted"):
        assert ("steps of recurrences", *by) in of_kernels(card, "flash", b.program())
    assert {*OPERATORS["scans"].values()} == {BLOCK}


def test_a_head_size_runs_as_the_next_that_is_compiled() -> None:
    assert [*map(grid.run_as, (64, 72, 80, 128, 129, 300))] == [64, 96, 96, 128, 160, 300]


def test_only_padding_that_the_measured_head_lacks_costs() -> None:
    assert grid.head_share(72, 128) == 0.75
    assert grid.head_share(72, 72) == grid.head_share(64, 128) == 1.0
    assert grid.head_share(128, 72) == pytest.approx(4 / 3)


def test_backward_has_a_block_for_each_128_keys_and_head() -> None:
    # a text of 120 tokens, 16 heads: 16 blocks, each of which computes 128 keys
    assert grid.backward_share(16, 120, 72, 132) == pytest.approx(16 / 132 * 120 / 128)
    assert grid.backward_share(16, 8 * 128, 72, 132) == pytest.approx(128 / 132)
    assert grid.backward_share(16, 9 * 128, 72, 132) == 1.0
    assert grid.backward_share(1, 64, 256, 2) == 0.5  # of wide heads a block has 64 keys


def test_a_card_of_many_multiprocessors_is_idle_in_a_small_backward_alone() -> None:
    idle, full = (with_card(attention=ATTENTION_RATES, multiprocessors=figure(n)) for n in (1000, 1))
    forward, backward = attention_seconds(full, "flash", 128, 128, True)
    assert attention_seconds(idle, "flash", 128, 128, True) == pytest.approx([forward, 1000 * backward])
    # other kernels are not of that design
    of_idle = attention_seconds(idle, "flash_attention_1", 128, 128, True)
    assert of_idle == attention_seconds(full, "flash_attention_1", 128, 128, True)


def test_one_efficiency_is_of_attention_too() -> None:
    card = with_card(attention=ATTENTION_RATES)
    whole = attention_seconds(card, "flash", 128, 128, True)
    halved = attention_seconds(card, "flash", 128, 128, True, calibration=Calibration(efficiency=0.5))
    assert halved == pytest.approx([2 * seconds for seconds in whole])


def attention(length: int, size: int = 8, causal: bool = True, dtype: Any = torch.bfloat16) -> Program:
    """A program of one forward call of one head."""
    q = torch.empty(1, 1, length, size, dtype=dtype)
    b = ProgramBuilder((1, 1, 1, 1))
    price = price_of(torch.ops.spbench.flash_attention.default)
    b.add_kernel((Kind.KERNEL, b.named(price.name), *price.of((q, q, q, 1.0, causal), {}, None)))
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
    experts = {ranks: [*stand_ins("megatron", "ddp", {"ep": ranks}, "EFA")] for ranks in (1, 2)}
    assert [str(each) for each in experts[2]] == [
        "Megatron's experts over EFA, measured slower",
        "expert parallelism, measured slower",
    ]
    assert not experts[1]
    # of these every cell's time is less sure, whether or not the cell names a program
    for program in ("", "deepspeed", "veomni"):
        assert next(stand_ins(program, "deepspeed_zero3", {"experts": 8})).work.endswith("of experts")
        assert [each.work for each in stand_ins(program, "deepspeed_zero3", {})] == ["DeepSpeed's ZeRO-3"]
        assert [each.work for each in stand_ins(program, "ddp", {"graphs": 2})] == ["CUDA graphs"]
    assert not [*stand_ins("megatron", "megatron", {"graphs": 1})]
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
    b.add_kernel((Kind.KERNEL, b.named(name or price.name), *price.of((a, a), {}, None)))
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
    b.add_kernel((Kind.KERNEL, b.named("add"), *price_of(torch.ops.aten.add.Tensor).of((a, a), {}, None)))
    assert of_kernels(on, "flash", b.program()) == [("memory, by operator", "a B200's", "transferred")]


def test_what_packaged_clusters_lack_a_rate_of() -> None:
    assert without_own_rates(load_cluster("dgx-h100")) == ["triton", "efficient_attention_with_mask"]
    assert {"intra-node links", "flash_attention_2"} < {*without_own_rates(load_cluster("a100-pcie-80gb"))}
    assert "attention" in without_own_rates(load_cluster("l40s"))
    assert "intra-node links" not in without_own_rates(load_cluster("l40s"))
    assert {"matmuls", "memory"} < {*without_own_rates(load_cluster("b300-sxm"))}
    assert without_own_rates(load_cluster("dgx-a100-datasheet")) == ["all, by the datasheet alone"]
    assert without_own_rates(load_cluster("local")) == []
