"""Files of documents' lengths: every form that they are dumped in, and one line for those that are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.setting_values import MOST_BINS, bins_of, lengths_in
from spbench.impls.models.model import model_preset

LENGTHS = np.array([100, 2000, 5, 100])


def test_every_dump_is_the_same(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", LENGTHS.astype(np.uint32))
    np.savetxt(tmp_path / "a.txt", LENGTHS)  # 1.000000000000000000e+02
    (tmp_path / "a.csv").write_text("length\n100\n2000\n\n5 # short\n100\n")  # as pandas' to_csv
    for suffix in ("npy", "txt", "csv"):
        assert [*lengths_in(tmp_path / f"a.{suffix}")] == [*LENGTHS]


def test_a_cell_keeps_bins_of_the_file(tmp_path: Path) -> None:
    np.save(file := tmp_path / "a.npy", LENGTHS)
    cell = Cell(model="attention-call", strategy="ring_attention", batch=1, seq_len=6000)
    cell = Cell.model_validate(cell.model_dump() | {"model_options": {"documents": str(file)}})
    assert cell.model_options == {"documents": [[5, 5, 1], [100, 100, 2], [2000, 2000, 1]]}
    file.unlink()  # which the cell needs no more
    drawn = {
        model_preset("attention-call", cell.model_options | {"documents_seed": seed}).attended(6000).documents
        for seed in range(3)
    }
    assert len(drawn) == 3
    for documents in drawn:
        assert sum(documents) == 6000
        assert {*documents[:-1]} <= {*LENGTHS}


def test_many_lengths_are_bins_of_as_many_documents() -> None:
    lengths = np.random.default_rng(0).integers(1, 10**6, 3000)
    bins = bins_of(lengths)
    assert len(bins) == MOST_BINS
    assert sum(count for *_, count in bins) == len(lengths)
    assert {count for *_, count in bins} == {11, 12}
    for first, last, count in bins:
        assert sum((lengths >= first) & (lengths <= last)) >= count


def test_a_scenario_names_a_file_beside_it(tmp_path: Path) -> None:
    cells = "{model: attention-call, strategy: ring_attention, batch: 1, seq_len: 64, sizes: {sp: 2}"
    (scenario := tmp_path / "packed.yaml").write_text(
        f"title: a\ngroups:\n  - {cells}, model_options: {{documents: lengths.txt}}}}\n"
    )
    (tmp_path / "lengths.txt").write_text("7\n9\n")
    ((cell,),) = load_scenario(scenario).cells.values()
    assert cell.model_options["documents"] == [[7, 7, 1], [9, 9, 1]]
    (tmp_path / "lengths.txt").write_text("7\nnine\n8\n")
    with pytest.raises(
        UserError, match=r"groups\[0\]\.model_options\.documents: .*lengths.txt:2: 'nine' is no"
    ):
        load_scenario(scenario)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no lengths; write one a line"),
        (b"length\n", "holds no lengths"),
        (b"a\nb\n3\n", ":2: 'b' is no length"),
        (b"1\n2,3\n", ":2: '2,3' is no length; write one length, an integer, a line"),
        (b"0,12\n", ":1: '0,12' is no length"),
        (b"1.5\n", ":1: '1.5' is no length"),
        (b"1e30\n", ":1: '1e30' is no length"),
        (b"nan\n", ":1: 'nan' is no length"),
        (b"4\n-1\n", "document 2 has -1 positions, and a document has at least 1"),
        (b"\xff\xfe", "a text file in UTF-16; save it in UTF-8"),
    ],
)
def test_no_lengths(tmp_path: Path, content: bytes, message: str) -> None:
    (file := tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as found:
        lengths_in(file)
    assert "\n" not in str(found.value)


def test_no_array_of_lengths(tmp_path: Path) -> None:
    arrays = (np.ones(3), np.ones((2, 2), int), np.array([3, 0]), np.array([{}], object))
    messages = ("float64 of shape", "int64 of shape", "document 2 has 0", "not an array as numpy.save")
    for array, message in zip(arrays, messages, strict=True):
        np.save(file := tmp_path / "a.npy", array, allow_pickle=True)
        with pytest.raises(UserError, match=message):
            lengths_in(file)
    (tmp_path / "a.npy").write_text("17\n")
    with pytest.raises(UserError, match="not an array"):
        lengths_in(tmp_path / "a.npy")
    for name, message in (("b.npy", "cannot read"), ("b.parquet", "lie in files .csv, .txt, .npy")):
        with pytest.raises(UserError, match=message):
            lengths_in(tmp_path / name)


@pytest.mark.parametrize("bins", [[[1, 2]], [[0, 3, 1]], [[5, 4, 1]], [[1, 2, 0]]])
def test_no_bins(bins: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"a bin of documents is \[shortest, longest, how many\]"):
        model_preset("attention-call", {"documents": bins})
