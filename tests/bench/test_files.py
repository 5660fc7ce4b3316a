"""Files are written whole or not at all; in a cache on disk what was used last stays, processes do not make a
value twice, and a full disk is no error.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from spbench.bench import files
from spbench.bench.errors import UserError
from spbench.bench.files import DiskCache, write_together, write_whole
from tests.bench.disk import files_of_at_most


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
