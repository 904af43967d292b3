"""Acts on modules as soon as a program has imported them; the standard library alone."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


class Finder(importlib.abc.MetaPathFinder):
    """Stands first in `sys.meta_path`, and calls what is given for a module once that is there."""

    def __init__(self, after: Mapping[str, Callable[[Any], None]]) -> None:
        self.after = after

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a module to be acted on; None leaves the module to other finders."""
        if name not in self.after:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                self.after[name](module)

            spec.loader.exec_module = exec_module
        return spec
