"""What is computed around an implementation; each module registers one workload."""

from attnbench.worker.workloads import attention, decode, layer, recurrent  # noqa: F401
from attnbench.worker.workloads.base import WORKLOADS, Bound

__all__ = ["WORKLOADS", "Bound"]
