"""What is computed around an implementation; modules register workloads and caches."""

from attnbench.worker.workloads import attention, decode, latent, layer, recurrent  # noqa: F401
from attnbench.worker.workloads.base import WORKLOADS, Bound

__all__ = ["WORKLOADS", "Bound"]
