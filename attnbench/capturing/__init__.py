"""Inside a user's program: which attention it calls, as a case list; no result changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attnbench.capturing import hooks
from attnbench.capturing.calls import Seen


@contextmanager
def capture() -> Iterator[Seen]:
    """Count the attention that is called meanwhile, in all threads.

    Of each distinct call: sizes, dtype, layout, the mask by its content, how often, and the
    lines and modules that made it. `.cases` is the case list; `.save(path)` writes it for
    the option --cases of advise and sweep. Seen are `F.scaled_dot_product_attention` under
    any name, `nn.MultiheadAttention` and `nn.TransformerEncoder` with their fast paths, and what
    transformers dispatches; in compiled regions SDPA and flex. No tensor is kept, no result
    changes, and names are restored at the end.
    """
    seen = Seen()
    hooks.start(seen)
    try:
        yield seen
    finally:
        hooks.stop(seen)
