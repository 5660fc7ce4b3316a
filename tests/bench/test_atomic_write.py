"""Files are written whole or not at all."""

import os
import threading
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.files import write_together, write_whole
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
