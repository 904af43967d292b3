"""Every Python process of a rehearsal finds this: the GPU is simulated before torch is used."""

import importlib.util
import os
import sys


class _After:
    """Calls a function of tests.rehearsal.hooks right after a module has loaded."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in ("torch", "attnbench.planning.presets"):
            return None
        from tests.rehearsal.hooks import HOOKS

        sys.meta_path.remove(_After)
        spec = importlib.util.find_spec(name)
        sys.meta_path.insert(0, _After)
        run = spec.loader.exec_module  # type: ignore[union-attr]

        def exec_module(module):
            run(module)
            HOOKS[name](module)

        spec.loader.exec_module = exec_module  # type: ignore
        return spec


if os.environ.get("ATTNBENCH_REHEARSAL") == "1":
    sys.meta_path.insert(0, _After)
