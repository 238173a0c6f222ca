from __future__ import annotations

import threading

from parquet_keytools.spark.frames import Frame, Operation
from parquet_keytools.spark.waiting_requests import MOST_TOGETHER, WaitingRequests


def test_what_waits_is_taken_together_by_operation() -> None:
    waiting = WaitingRequests()
    kinds = [Operation.WRAP, Operation.UNWRAP, Operation.WRAP, Operation.UNWRAP, Operation.UNWRAP]
    for request_id, kind in enumerate(kinds):
        waiting.put(Frame(request_id, kind))
    assert [frame.request_id for frame in waiting.take()] == [0, 2]
    assert [frame.request_id for frame in waiting.take()] == [1, 3, 4]


def test_no_more_than_a_limit_is_taken() -> None:
    waiting = WaitingRequests()
    for request_id in range(MOST_TOGETHER + 1):
        waiting.put(Frame(request_id, Operation.WRAP))
    assert [len(waiting.take()), len(waiting.take())] == [MOST_TOGETHER, 1]


def test_the_end_wakes_all_and_loses_nothing() -> None:
    waiting = WaitingRequests()
    taken: list[list[Frame]] = []

    def serve() -> None:
        while frames := waiting.take():
            taken.append(frames)

    threads = [threading.Thread(target=serve) for _ in range(3)]
    for thread in threads:
        thread.start()
    for request_id in range(50):
        waiting.put(Frame(request_id, Operation.WRAP))
    waiting.close()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert sorted(frame.request_id for frames in taken for frame in frames) == list(range(50))
