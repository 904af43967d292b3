"""naive and sdpa under other names as well: whatever is measured, they are level."""

from attnbench.api import IMPLEMENTATIONS, attention_builder


@attention_builder("naive-twin", time="n^2 d")
def build_naive_twin(case):
    """The same as naive."""
    return IMPLEMENTATIONS.get("naive").build(case)


@attention_builder("sdpa-twin", time="n^2 d")
def build_sdpa_twin(case):
    """The same as sdpa."""
    return IMPLEMENTATIONS.get("sdpa").build(case)
