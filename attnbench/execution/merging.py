"""Several runs as one: the shards of a sweep, each measured where there was room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attnbench.base.files import digest
from attnbench.base.jsontext import checksum, dumps
from attnbench.errors import UsageError
from attnbench.machine.environment import Environment, asked
from attnbench.machine.limits import ceilings_of
from attnbench.planning.plan import Plan
from attnbench.schema.record import Record
from attnbench.store.runs import RECORDS, Run, missing_shards, new_run


def shard_of(whole: Plan, number: int, count: int) -> dict[str, Any]:
    """What `run.json` says of a shard: which it is, of how many, and of what plan."""
    return {"numbers": [number], "count": count, "plan": _id(cell.key for cell in whole.cells)}


def merge(
    runs: Sequence[Run],
    output: Path,
    name: str | None = None,
    *,
    partial: bool = False,
    mixed: bool = False,
) -> Path:
    """Write one run of all records of several; return its folder.

    Its `run.json` names the runs that it was made of, its records their machines. With `partial`
    shards may be missing, with `mixed` versions may differ.

    Raises:
        StoreError: nothing can be written.
        UsageError: they are not of one experiment, share a cell, or a shard is missing.
    """
    _check(runs, mixed=mixed)
    shard = _joined(runs, partial=partial)
    environments: dict[str, dict[str, Any]] = {}
    sources, records = [], list[Record]()
    for run in runs:
        keys = {key: Environment(facts).key for key, facts in run.environments.items()}
        for key, facts in run.environments.items():  # an unfinished one may lack ceilings
            known = environments.get(keys[key], {})
            both = known | facts, facts | known  # what was measured stands before a cache's
            environments[keys[key]] = min(both, key=lambda each: ceilings_of(each).cached)
        records += [replace(part, environment=keys[part.environment]) for part in run.parts]
        sources.append(
            {key: run.info.get(key) for key in ("run_id", "created", "attnbench", "commit")}
            | {"shard": run.info.get("shard"), "merged": run.info.get("merged")}
            | {"environments": list(keys.values()), "records": digest(run.path / RECORDS)}
        )
    own = ("run_id", "schema", "shard")
    first = {key: value for key, value in runs[0].info.items() if key not in own}
    main = Environment(runs[0].environments[""]).key
    every = (row for run in runs for row in run.info.get("implementations") or ())
    info = first | {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "options": {k: v for k, v in (first.get("options") or {}).items() if k not in _OWN},
        "environment": environments.pop(main),
        "environments": environments,
        "implementations": [*{row["name"]: row for row in every}.values()],
        "plan": [cell.to_json() for run in runs for cell in run.cells],
        "spent": dict(sum((Counter(run.info.get("spent")) for run in runs), Counter())),
        "merged": sources,
        **({"shard": shard} if shard else {}),
    }
    records = [replace(r, environment="") if r.environment == main else r for r in records]
    with new_run(output, name, info) as folder:
        folder.append(*(record.to_line() for record in records))
        return folder.path


_OWN = ("name", "output", "shard")  # options of one run alone


def _id(keys: Iterable[tuple[str, str]]) -> str:
    """What names a plan, in whatever order its cells stand."""
    return checksum(dumps(sorted(keys)).encode())


def _joined(runs: Sequence[Run], *, partial: bool) -> dict[str, Any] | None:
    """What shard the merged run is; None where it has all of its plan, or is of none."""
    shard: dict[str, Any] | None = runs[0].info.get("shard")
    if not shard or _id(cell.key for run in runs for cell in run.cells) == shard["plan"]:
        return None
    numbers = sorted(number for run in runs for number in run.info["shard"]["numbers"])
    joined = shard | {"numbers": numbers}
    if not partial:
        raise UsageError(
            f"shards of the plan are missing: {', '.join(missing_shards(joined))}; measure them"
            " with --shard, or merge what there is with --partial"
        )
    return joined


def _check(runs: Sequence[Run], *, mixed: bool) -> None:
    """Raise UsageError unless the runs are of one experiment, and each cell is in one of them."""
    if len(runs) < 2:
        raise UsageError("merge takes two runs or more: attnbench merge RUN RUN …")
    owners: dict[Any, Run] = {}
    for run in runs:
        facts, others = _facts(run, mixed=mixed), _facts(runs[0], mixed=mixed)
        if differ := [
            f"{name} {others.get(name)} and {facts.get(name)}"
            for name in others | facts
            if others.get(name) != facts.get(name)
        ]:
            hint = "" if mixed else "; --mixed merges versions that differ"
            raise UsageError(
                f"{runs[0].path} and {run.path} are not of one experiment:"
                f" {', '.join(differ)}{hint}"
            )
        for cell in run.cells:
            if other := owners.setdefault(cell.key, run) is not run and owners[cell.key]:
                raise UsageError(
                    f"{cell.impl} on case {cell.case.case_id} is in both {other.path} and"
                    f" {run.path}; leave one of them out"
                )


def _facts(run: Run, *, mixed: bool) -> dict[str, Any]:
    """What must be the same in all runs: how they measured, and with what."""
    known = run.info.get("settings") or {}
    settings = {k: v for k, v in known.items() if k not in ("files", "ceilings")}
    shard, here = run.info.get("shard") or {}, run.environments[""]
    facts = settings | {"shards": shard.get("count"), "the plan": shard.get("plan")}
    facts["the files of --impl"] = sorted((run.info.get("files") or {}).values())
    if not mixed:
        here = here | {"attnbench": run.info.get("attnbench")}
        facts |= {name: here.get(name) for name in asked("merge")}
    return facts
