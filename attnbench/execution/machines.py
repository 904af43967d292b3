"""The machines of a run: whose records may stand beside each other."""

from __future__ import annotations

from typing import Any

from attnbench.errors import UsageError
from attnbench.machine.environment import Environment, asked
from attnbench.store.folder import RunFolder
from attnbench.store.runs import write_info

Facts = dict[str, Any]


class Machines:
    """The environments of a run, as `run.json` has them: whose records may stand beside theirs."""

    def __init__(
        self, folder: RunFolder, info: Facts, *, mixed: bool = True, nodes: bool = False
    ) -> None:
        self.folder, self.info, self._mixed = folder, info, mixed
        self._names = asked("nodes" if nodes else "resume")  # the same experiment
        first = {"attnbench": self.info.get("attnbench")} | self.info["environment"]
        self.environments: dict[str, Facts] = {"": first} | self.info.get("environments", {})
        self._keys: dict[str, str] = {}  # by those of an executor

    def admit(self, facts: Facts) -> Facts:
        """The facts of a machine, with the ceilings that the run knows of it.

        Raises:
            UsageError: it is like none of the run's.
        """
        here = Environment(facts)
        every = [
            Environment(known).differences(here, self._names)
            for known in self.environments.values()
        ]
        if (lines := min(every, key=len)) and not self._mixed:
            raise UsageError(
                f"this is not where the run began: {'; '.join(map(str, lines))} (--resume); start a"
                " new run, or measure the rest here with --mixed: the table then names both"
            )
        known = self.environments.get(self.like(facts), {})
        return facts | ({"ceilings": known["ceilings"]} if "ceilings" in known else {})

    def like(self, facts: Facts) -> str:
        """Under what `run.json` has a machine like this one, or would have it."""
        names, here = (*asked("resume"), *asked("node")), Environment(facts)
        of = ((key, Environment(known)) for key, known in self.environments.items())
        return next((key for key, one in of if not one.differences(here, names)), here.key)

    def key(self, own: str, facts: Facts) -> str:
        """Under what `run.json` has the facts that an executor has as `own`, from now on."""
        if own not in self._keys:
            self._keys[own] = self.like(facts)
        known = self.environments.get(key := self._keys[own], {})
        latest = {name: facts[name] for name in facts.keys() & {"ceilings"}}
        if (found := facts | known | latest) != known:
            self.environments[key] = found
            others = {k: v for k, v in self.environments.items() if k}
            self.info |= {"environment": self.environments[""]}
            self.info |= {"environments": others} if others else {}
            write_info(self.folder, self.info)
        return key
