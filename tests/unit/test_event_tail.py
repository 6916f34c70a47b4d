"""RunEventTail reads event files in order of time, a bounded amount per call."""

import json
from pathlib import Path
from typing import Any

import pytest

from lakh.events import EventFilesReplaced, RunEventTail


def write(path: Path, *times: float, mode: str = "a", end: str = "\n") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.write("\n".join(json.dumps({"time_s": t, "rank": 0, "step": 1, "kind": "x"}) for t in times) + end)


def times_of(tail: RunEventTail) -> list[float]:
    records, _ = tail.new_records(5.0)
    return [record["time_s"] for record in records]


def test_an_incomplete_line_is_read_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    tail = RunEventTail(tmp_path)
    assert times_of(tail) == []  # no folder of events yet
    write(path, 1.0)
    with path.open("a") as file:
        file.write('{"time_s": 2.0, "ra')
    assert times_of(tail) == [1.0]
    assert tail.new_records(5.0) == ([], False)
    with path.open("a") as file:
        file.write('nk": 0, "step": 1, "kind": "x"}\n')
    assert times_of(tail) == [2.0]
    assert tail.progress()["unreadable_lines"] == 0


def test_malformed_lines_are_counted_and_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, 1.0)
    with path.open("ab") as file:
        file.write(b'\x00\x00\xff\n[1]\n{"kind": 3, "time_s": 1, "step": 0}\n{"kind": "x", "time_s": null}\n')
    write(path, 2.0)
    tail = RunEventTail(tmp_path)
    assert times_of(tail) == [1.0, 2.0]
    assert tail.progress()["unreadable_lines"] == 4


@pytest.mark.parametrize("read_bytes", [64, 150, 1 << 20])
def test_records_of_several_ranks_come_in_order_of_time_for_any_block_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read_bytes: int
) -> None:
    monkeypatch.setattr("lakh.events.reading.READ_BYTES", read_bytes)
    write(tmp_path / "events" / "rank-00000.jsonl", *[float(t) for t in range(0, 100, 2)])
    write(tmp_path / "events" / "rank-00001.jsonl", *[float(t) for t in range(1, 100, 2)])
    tail, found, more = RunEventTail(tmp_path), [], True
    while more:
        records, more = tail.new_records(0.0)
        found += [record["time_s"] for record in records]
    assert found == [float(t) for t in range(100)]
    progress = tail.progress()
    assert progress["bytes"] == progress["of_bytes"]


def test_garbage_longer_than_a_block_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.events.reading.READ_BYTES", 128)
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, 1.0)
    with path.open("ab") as file:
        file.write(b"\0" * 1000 + b"\n")
    write(path, 2.0)
    tail = RunEventTail(tmp_path)
    assert times_of(tail) == [1.0, 2.0]
    assert tail.progress()["unreadable_lines"] > 0


def test_a_replaced_or_removed_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "events" / "rank-00000.jsonl"
    write(path, 1.0, 2.0, 3.0)
    tail = RunEventTail(tmp_path)
    assert len(times_of(tail)) == 3
    write(path, 9.0, mode="w")
    with pytest.raises(EventFilesReplaced):
        tail.new_records(5.0)
    tail = RunEventTail(tmp_path)
    assert times_of(tail) == [9.0]
    path.unlink()
    with pytest.raises(EventFilesReplaced):
        tail.new_records(5.0)


def test_a_file_without_read_permission_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "events" / "rank-00000.jsonl", 1.0)
    write(tmp_path / "events" / "rank-00001.jsonl", 2.0)
    opened = Path.open

    def refuse(path: Path, *arguments: Any) -> Any:
        if path.name == "rank-00000.jsonl":
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments)

    tail = RunEventTail(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", refuse)
        assert times_of(tail) == [2.0]
        assert tail.unreadable == {tmp_path / "events" / "rank-00000.jsonl": "Permission denied"}
        assert times_of(tail) == []
    assert times_of(tail) == [1.0]  # it need not grow
    assert (tail.unreadable, tail.progress()["unreadable_lines"]) == ({}, 0)


def test_a_folder_that_cannot_be_read_is_named_and_what_was_read_stays(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    tail = RunEventTail(tmp_path)
    assert (times_of(tail), tail.unreadable) == ([], {})  # there is none yet
    folder.symlink_to(folder)
    assert times_of(tail) == []
    assert tail.unreadable == {folder: "Too many levels of symbolic links"}
    folder.unlink()
    write(folder / "rank-00000.jsonl", 1.0)
    assert (times_of(tail), tail.unreadable) == ([1.0], {})
    folder.rename(tmp_path / "moved")
    folder.write_text("")
    assert (times_of(tail), tail.unreadable) == ([], {folder: "Not a directory"})
    folder.unlink()
    (tmp_path / "moved").rename(folder)
    write(folder / "rank-00000.jsonl", 2.0)
    (folder / "rank-00001.jsonl").symlink_to("rank-00001.jsonl")
    assert times_of(tail) == [2.0]  # and not 1.0 again
    assert list(tail.unreadable) == [folder / "rank-00001.jsonl"]


def test_a_call_returns_about_as_many_records_as_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lakh.events.reading.READ_BYTES", 150)
    for rank in range(3):
        write(tmp_path / "events" / f"rank-{rank:05d}.jsonl", *[float(t) for t in range(rank, 60, 3)])
    tail, found, sizes, more = RunEventTail(tmp_path), [], [], True
    while more:
        records, more = tail.new_records(max_records=4)
        found += [record["time_s"] for record in records]
        sizes.append(len(records))
    assert found == [float(t) for t in range(60)]
    assert max(sizes) < 12
