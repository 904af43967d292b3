"""How many small changes of one deciding module do its tests notice?

`make mutation MODULE=gate/decide` draws changes with cosmic-ray, applies them one at a time to a
copy of the tree, and runs the tests named below. The order comes from a fixed seed: two runs over
the same source try the same changes. It prints the survivors, of which many change nothing that
matters; compare scores of one module before and after a change of its tests.
"""

from __future__ import annotations

import os
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What decides, and the tests that hold it; quick ones first.
TESTS = {
    "gate/decide": "gate_sign_test gate_sequential gate_verdict gate_exact gate_observation"
    " gate_stored",
    "worker/reference": "check fault",
    "theory/costs": "costs decode",
    "base/stats": "times speed",
    "execution/supervision": "supervision",
}
# Most of these stand in annotations (int | None), where no test can notice them.
ANNOTATIONS = "core/ReplaceBinaryOperator_BitOr_"


def main(module: str, limit_s: float, most: int) -> int:
    from cosmic_ray.commands import init
    from cosmic_ray.mutating import mutate_and_test
    from cosmic_ray.work_db import WorkDB
    from cosmic_ray.work_item import TestOutcome

    with tempfile.TemporaryDirectory(prefix="attnbench-mutation-") as folder:
        copy_tree(Path(folder))
        os.chdir(folder)
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        path = Path("attnbench") / module
        files = sorted(path.glob("*.py")) or [path.with_suffix(".py")]
        tests = [f"tests/test_{name}.py" for name in TESTS[module].split()]
        python = ROOT / ".venv/bin/python"
        command = shlex.join([str(python), *"-m pytest -x -q -p no:cacheprovider".split(), *tests])
        begin = time.monotonic()
        if subprocess.run(shlex.split(command), capture_output=True).returncode:
            print(f"these tests fail without any change: {command}", file=sys.stderr)
            return 2
        patience_s = 10 + 5 * (time.monotonic() - begin)
        database = WorkDB(":memory:", mode=WorkDB.Mode.create)
        init(files, database, {})
        changes = [item.mutations for item in database.pending_work_items]
        changes = [c for c in changes if not c[0].operator_name.startswith(ANNOTATIONS)]
        changes.sort(key=lambda c: (str(c[0].module_path), c[0].operator_name, c[0].occurrence))
        random.Random(0).shuffle(changes)
        outcomes: Counter[TestOutcome] = Counter()
        begin = time.monotonic()
        for change in changes[:most]:
            if time.monotonic() - begin > limit_s:
                break
            result = mutate_and_test(change, command, patience_s)
            outcomes[result.test_outcome] += 1
            if result.test_outcome is TestOutcome.SURVIVED:
                print(result.diff, flush=True)
    caught, survived = outcomes[TestOutcome.KILLED], outcomes[TestOutcome.SURVIVED]
    print(
        f"{module}: {caught} of {caught + survived} changes noticed"
        f" ({caught / max(1, caught + survived):.0%}), of {len(changes)} that there are"
    )
    return 0


def copy_tree(folder: Path) -> None:
    """What git knows, without results/, which the copy shares."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in names:
        if name and not name.startswith("results/") and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    (folder / "results").symlink_to(ROOT / "results")
    (folder / "attnbench_impls").symlink_to("impls")  # as in pyproject's package-dir


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in TESTS or not "".join(sys.argv[2:]).isdigit():
        print(f"make mutation MODULE={'|'.join(TESTS)} SECONDS=300 CHANGES=1000", file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
