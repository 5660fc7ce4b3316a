"""Files are written whole or not at all; in a cache on disk what was used last stays, processes do not make a
value twice, and a full disk is no error. Files of documents' lengths: every form that they are dumped in, and
one line for those that are not."""

import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from spbench.bench import files
from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.files import DiskCache, write_together, write_whole
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.setting_values import MOST_BINS, bins_of, lengths_in
from spbench.impls.registries import model_preset
from tests.bench.hosts import files_of_at_most
from tests.grid import tabled


def test_text_and_bytes_with_missing_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "file"
    assert write_whole(path, "naïve\r\n") == path
    assert path.read_bytes() == "naïve\r\n".encode()
    write_whole(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert list(path.parent.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = write_whole(tmp_path / "file", "old")
    with files_of_at_most(10), pytest.raises(UserError, match=rf"^cannot write {path}: File too large$"):
        write_whole(path, "new and too long")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_files_written_together_all_are_new_or_none_is(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "folder" / "b"]
    assert write_together(dict.fromkeys(paths, "old")) == paths
    with files_of_at_most(10), pytest.raises(UserError, match=rf"^cannot write {paths[1]}: File too large$"):
        write_together(dict(zip(paths, ("new", "new and too long"), strict=True)))
    assert [path.read_text() for path in paths] == ["old", "old"]
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == paths


def test_an_interrupt_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_whole(tmp_path / "file", "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_permissions_and_links_stay(tmp_path: Path) -> None:
    plain, path, link = tmp_path / "plain", tmp_path / "file", tmp_path / "link"
    plain.write_text("")
    write_whole(path, "old")
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    link.symlink_to(path)
    write_whole(link, "new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write_whole(pipe, "through")
    reader.join(10)
    assert read == [b"through"]
    assert pipe.is_fifo()


def test_a_folder_in_the_place_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^cannot write {tmp_path}: "):
        write_whole(tmp_path, "x")
    assert list(tmp_path.iterdir()) == []


def keys(cache: DiskCache) -> set[str]:
    return {path.name for path in cache.folder.glob("??/*")}


def test_a_value_is_there_for_others(tmp_path: Path) -> None:
    assert DiskCache(tmp_path / "traces", 100).read("ab1") is None
    DiskCache(tmp_path / "traces", 100).write("ab1", b"value")
    assert DiskCache(tmp_path / "traces", 100).read("ab1") == b"value"


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WRITES_BETWEEN_LOOKS", 1)
    cache = DiskCache(tmp_path, limit_bytes=25)
    for age, key in ((300, "aa"), (200, "bb")):
        cache.write(key, b"0123456789")
        then = time.time() - age
        os.utime(tmp_path / key / key, (then, then))
    assert cache.read("aa") == b"0123456789"  # so that bb is the one
    cache.write("cc", b"0123456789")
    assert keys(cache) == {"aa", "cc"}


def test_the_limit_is_kept_by_the_next_process(tmp_path: Path) -> None:
    for limit, kept in ((25, 2), (30, 3)):
        for number in range(5):
            DiskCache(tmp_path, limit).write(f"{number}{number}", b"0123456789")
        assert len(keys(DiskCache(tmp_path, limit))) == kept


def _make(folder: Path, made: Path) -> None:
    cache = DiskCache(folder, 100)
    with cache.making("ab"):
        if cache.read("ab") is None:
            time.sleep(0.2)
            with made.open("a") as file:
                file.write("made\n")
            cache.write("ab", b"value")


def test_processes_wait_for_the_one_that_makes_the_value(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_make, args=(tmp_path / "c", tmp_path / "made")) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert (tmp_path / "made").read_text() == "made\n"


def test_a_folder_that_cannot_be_written_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = DiskCache(tmp_path / "file" / "traces", 100)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            with cache.making("ab"):
                cache.write("ab", b"value")
    assert cache.read("ab") is None
    assert [record.getMessage() for record in caplog.records] == [
        f"nothing is kept in {cache.folder}: [Errno 20] Not a directory: '{cache.folder}'"
    ]


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


@tabled(__file__, "no_lengths")
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
