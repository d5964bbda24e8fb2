"""What is read at once: calls cover a run once, piece by piece, and are no longer than the kernel takes."""

import random

from persistkv_lmdb.gathering import MOST_BUFFERS
from persistkv_lmdb.runs import CALL_BYTES, Run, calls_of, pieces_of

PAGE = 4096


def buffers_of(lengths):
    return [memoryview(bytes(length)) for length in lengths]


def cut(lengths, counts):
    run = Run(3, 7 * PAGE, sum(lengths))
    buffers = buffers_of(lengths)
    return run, buffers, list(calls_of(run, buffers, counts))


def test_calls_cover_a_run_once():
    draw = random.Random(5)
    for _ in range(200):
        counts = [draw.randint(1, 40) for _ in range(draw.randint(1, 60))]
        lengths = [PAGE * draw.choice((1, 4, 16, 256)) for _ in range(sum(counts))]
        run, buffers, calls = cut(lengths, counts)
        assert [buffer for call in calls for buffer in call.buffers] == buffers
        assert [piece for call in calls for piece in call.pieces] == list(range(len(counts)))
        pieces = [piece for call in calls for piece in pieces_of(call, counts)]
        for part in (calls, pieces):
            end = run.offset
            for one in part:
                assert (one.run.segment, one.run.offset) == (run.segment, end)
                assert one.run.length == sum(map(len, one.buffers))
                end += one.run.length
            assert end == run.offset + run.length
        assert [len(piece.buffers) for piece in pieces] == counts
        assert all(len(call.buffers) <= MOST_BUFFERS for call in calls)


def test_calls_are_equally_long_but_for_the_last():
    _, _, calls = cut([256 << 10] * 60, [4] * 15)
    assert [call.run.length for call in calls] == [CALL_BYTES] * 3 + [3 << 20]


def test_no_call_has_more_buffers_than_the_kernel_takes():
    _, _, calls = cut([PAGE] * 1500, [300] * 5)
    assert [len(call.buffers) for call in calls] == [900, 600]


def test_a_piece_of_more_buffers_than_that_is_a_call_of_its_own():
    counts = [1, MOST_BUFFERS + 1, 1]
    _, _, calls = cut([PAGE] * sum(counts), counts)
    assert [len(call.buffers) for call in calls] == counts
