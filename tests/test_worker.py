"""What a worker says where it cannot even begin to measure."""

import contextlib
from typing import Any

import pytest

from attnbench.measure.graph import CaptureError
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.worker import __main__ as worker

FAILURES: dict[str, tuple[Exception, str, str]] = {
    "no memory for the flush": (MemoryError(), "oom", "set-up: out of memory"),
    "no graphs": (CaptureError("--timer graph needs more"), "unsupported", "--timer graph needs"),
    "anything else": (ValueError("no clock"), "error", "set-up: ValueError: no clock"),
}


class NoBeacon:
    def write(self, *place: object) -> None:
        pass


@pytest.mark.parametrize("place", ["of", "stream"])
@pytest.mark.parametrize(("err", "status", "reason"), FAILURES.values(), ids=FAILURES)
def test_a_worker_that_cannot_set_up_says_so_of_each_cell_and_lives(
    monkeypatch, place, err, status, reason
):
    class BrokenSetup:
        @classmethod
        def of(cls, request: dict[str, Any], device: str) -> "BrokenSetup":
            if place == "of":
                raise err
            return cls()

        def stream(self) -> contextlib.AbstractContextManager[None]:
            raise err

    monkeypatch.setattr(worker, "Setup", BrokenSetup)
    cases = [Case(seq_len=length) for length in (8, 16, 32)]
    rows = [{"case": case.to_json(), "impls": ["a", "b"]} for case in cases]
    emitted: list[dict[str, Any]] = []
    worker._serve(
        {"do": "measure", "heats": [rows[:2], rows[2:]]},
        NoBeacon(),  # type: ignore[arg-type]
        lambda event, **fields: emitted.append(fields),
    )
    keys = [(index, impl) for index in range(3) for impl in "ab"]
    assert [tuple(fields["key"]) for fields in emitted] == keys
    for (index, impl), fields in zip(keys, emitted, strict=True):
        record = Record.from_line(fields["result"])
        assert (record.cell.case, record.cell.impl) == (cases[index], impl)
        assert record.status == status
        assert str(record.reason).startswith(reason)
