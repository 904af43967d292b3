"""The facts of a run's machine where the system refuses some of them."""

import functools
import json
import os

import pytest

from attnbench.machine import facts, host


@pytest.mark.parametrize("error", [PermissionError, OSError])
def test_a_refused_affinity_is_unknown_and_the_cores_are_those_of_the_machine(monkeypatch, error):
    def refuse(pid):
        raise error(1, "Operation not permitted")

    monkeypatch.setattr("os.sched_getaffinity", refuse, raising=False)
    found = facts.environment("cpu")
    assert (found["cores"], found["affinity"]) == (os.cpu_count(), None)
    json.dumps(found)


def test_caches_of_every_unit_are_in_bytes_and_are_those_of_a_cpu_in_the_affinity(
    tmp_path, monkeypatch
):
    for cpu, last in ((0, "8M"), (4, "96M")):
        for level, size in ((1, "48K"), (3, last)):
            index = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index{level}"
            index.mkdir(parents=True)
            for name, text in {"level": level, "type": "Unified", "size": size}.items():
                (index / name).write_text(f"{text}\n")
    monkeypatch.setattr(host, "data_caches", functools.partial(host.data_caches, root=tmp_path))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5}, raising=False)
    assert facts.environment("cpu")["caches"] == {"L1": 48 << 10, "L3": 96 << 20}
