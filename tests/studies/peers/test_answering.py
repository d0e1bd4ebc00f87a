"""Line protocol of a peer process."""

from __future__ import annotations

import io
import json

from examples.studies.peers.answering import serve


def test_lines() -> None:
    requests = [{"ids": [1, 2], "new_tokens": 2}, {"ids": [3], "new_tokens": 1}]
    written = io.StringIO()
    serve(
        {"version": 1},
        lambda ids, new_tokens: [ids[-1]] * new_tokens,
        io.StringIO("".join(json.dumps(one) + "\n" for one in requests)),
        written,
    )
    facts, *answers = map(json.loads, written.getvalue().splitlines())
    assert facts == {"version": 1}
    assert [answer["ids"] for answer in answers] == [[1, 2, 2, 2], [3, 3]]
    assert all(answer["processor_seconds"] >= 0 for answer in answers)
