"""Workloads: what is computed around a core implementation. Each module registers one."""

from attnbench.worker.workloads import attention, decode, layer, recurrent
from attnbench.worker.workloads.base import WORKLOADS, Bound, Workload

__all__ = ["WORKLOADS", "Bound", "Workload", "attention", "decode", "layer", "recurrent"]
