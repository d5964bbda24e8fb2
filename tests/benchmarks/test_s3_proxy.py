"""Counts of the requests on a connection, for a stream split at any position."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.s3_proxy import Requests

GET = b"GET /bucket/key HTTP/1.1\r\nHost: x\r\n\r\n"
BODY = b"PUT /not-a-request HTTP/1.1\r\n\r\n" + bytes(200)
PUT = b"PUT /bucket/key HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY
EXPECTING = (
    b"PUT /bucket/key HTTP/1.1\r\nExpect: 100-Continue\r\ncontent-length: 300\r\n\r\n"
)


@pytest.mark.parametrize("piece", [1, 7, 1000])
def test_requests_body_that_looks_like_request_is_not_counted(piece: int) -> None:
    counts: Counter[str] = Counter()
    requests = Requests(counts)
    carried = GET + PUT + GET + PUT + b"DELETE /k HTTP/1.1\r\n\r\n"
    for start in range(0, len(carried), piece):
        requests.feed(carried[start : start + piece])
    assert counts == {"GET": 2, "PUT": 2, "DELETE": 1}


def test_requests_omitted_expect_continue_body_counts_next_request() -> None:
    counts: Counter[str] = Counter()
    requests = Requests(counts)
    for data in (
        EXPECTING,
        bytes(300),
        EXPECTING,
        GET,
        EXPECTING,
        bytes(100),
        bytes(200),
        GET,
    ):
        requests.feed(data)
    assert counts == {"PUT": 3, "GET": 2}
