"""Found by every Python process of a rehearsal: the simulated GPU is there before torch is used."""

import importlib.util
import os
import sys

if os.environ.get("ATTNBENCH_REHEARSAL"):
    _HOOKS = {
        "torch": "install",
        "torch.nn.attention.flex_attention": "simulate_flex",
        "attnbench.api.helpers": "simulate_triton",
        "attnbench.machine.host": "quiet_host",
        "attnbench.planning.presets": "shrink_presets",
        "attnbench_impls.chunked": "shrink_blocks",
    }

    class _After:
        """Calls a function of tests.rehearsal.cuda right after one of these modules has loaded."""

        @staticmethod
        def find_spec(name, path=None, target=None):
            if name not in _HOOKS:
                return None
            sys.meta_path.remove(_After)
            try:
                spec = importlib.util.find_spec(name)
            finally:
                sys.meta_path.insert(0, _After)
            if spec is None or spec.loader is None:
                return spec
            run = spec.loader.exec_module

            def exec_module(module):
                run(module)
                from tests.rehearsal import hooks

                getattr(hooks, _HOOKS[name])(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
            return spec

    sys.meta_path.insert(0, _After)
