"""Events are written once, never block, and incomplete lines are not read."""

import threading
from pathlib import Path

from lakh import events
from lakh.events import Evaluated, EventLog, EventsDropped, StepSkipped, UnknownEvent


def test_written_events_are_read_back_with_time_and_rank(tmp_path: Path) -> None:
    with EventLog(tmp_path, rank=3, clock=lambda: 12.5) as log:
        log.write(Evaluated(step=7, loss=2.5, sequences=8, seconds=0.5))
    assert events.read(tmp_path) == [Evaluated(time_s=12.5, rank=3, step=7, loss=2.5, sequences=8, seconds=0.5)]


def test_events_of_all_ranks_are_in_order_of_time(tmp_path: Path) -> None:
    for rank, time_s in ((0, 2.0), (1, 1.0)):
        with EventLog(tmp_path, rank=rank) as log:
            log.write(StepSkipped(time_s=time_s, reason="r"))
    assert [event.rank for event in events.read(tmp_path)] == [1, 0]
    assert [event.rank for event in events.read(tmp_path, rank=0)] == [0]


def test_an_incomplete_line_is_read_later(tmp_path: Path) -> None:
    with EventLog(tmp_path) as log:
        log.write(StepSkipped(reason="first"))
    file = tmp_path / "events" / "rank-00000.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    polls = iter([False, True])
    seen = []
    for event in events.follow(tmp_path, poll_s=0.01, until=lambda: next(polls)):
        seen.append(event)
        file.write_bytes(whole + whole)
    assert [event.reason for event in seen] == ["first", "first"]


def test_incomplete_and_unknown_lines_do_not_stop_a_reader(tmp_path: Path) -> None:
    folder = tmp_path / "events"
    folder.mkdir()
    lines = ["{torn", '{"time_s":1,"rank":0,"step":2,"kind":"new_kind","x":5}', '["no object"]', ""]
    (folder / "rank-00000.jsonl").write_text("\n".join(lines))
    assert events.read(tmp_path) == [UnknownEvent(time_s=1, rank=0, step=2, name="new_kind", fields={"x": 5})]


def test_a_slow_disk_drops_events_and_counts_them(tmp_path: Path) -> None:
    log = EventLog(tmp_path, queue_events=4)
    gate = threading.Event()
    append = log._append
    log._append = lambda event: (gate.wait(10), append(event))  # type: ignore[method-assign]
    for step in range(20):
        log.write(StepSkipped(step=step, reason="r"))  # returns at once although nothing is written yet
    gate.set()
    log.close()
    found = events.read(tmp_path)
    written = [event for event in found if isinstance(event, StepSkipped)]
    dropped = sum(event.count for event in found if isinstance(event, EventsDropped))
    assert len(written) + dropped == 20
    assert dropped > 0


def test_every_kind_of_event_has_a_unique_name() -> None:
    assert len(events.Event.kinds) == len(set(events.Event.kinds.values()))
    assert all(kind == cls.kind for kind, cls in events.Event.kinds.items())
