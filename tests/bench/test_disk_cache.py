"""A cache on disk: what was used last stays, processes do not make a value twice, a full disk is no error."""

import logging
import multiprocessing
import os
import time
from pathlib import Path

import pytest

from spbench.bench import disk_cache
from spbench.bench.disk_cache import DiskCache


def keys(cache: DiskCache) -> set[str]:
    return {path.name for path in cache.folder.glob("??/*")}


def test_a_value_is_there_for_others(tmp_path: Path) -> None:
    assert DiskCache(tmp_path / "traces", 100).read("ab1") is None
    DiskCache(tmp_path / "traces", 100).write("ab1", b"value")
    assert DiskCache(tmp_path / "traces", 100).read("ab1") == b"value"


def test_what_was_used_longest_ago_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_cache, "_WRITES_BETWEEN_LOOKS", 1)
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
