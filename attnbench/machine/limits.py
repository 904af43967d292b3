"""What a device can do at most, measured or by its datasheet, and why a time beyond it is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from attnbench.base.registry import Registry

MIB = 2**20


class Peaks(NamedTuple):
    """Dense datasheet peaks of one device: TFLOP/s by kind of arithmetic, TB/s, bytes of L2.

    `pattern` must match the whole name that the driver reports, so that a slice or a weaker
    namesake (MIG, NVL, 40 GB) is left without peaks rather than given the wrong ones.
    """

    pattern: str
    half_tflops: float
    tf32_tflops: float
    single_tflops: float
    memory_tbps: float
    cache_bytes: int

    def tflops(self, dtype: str, matmul_precision: str | None) -> float | None:
        """Peak TFLOP/s for `dtype`; float32 counts as TF32 unless precision is `highest`."""
        if dtype in ("bfloat16", "float16"):
            return self.half_tflops
        if dtype == "float32":
            return self.single_tflops if matmul_precision == "highest" else self.tf32_tflops
        return None


PEAKS: Registry[Peaks] = Registry("device with known peaks")


# NVIDIA's datasheets, without 2:4 sparsity; for the RTX card the shader rates are left aside.
# TFLOP/s of 16-bit floats, of TF32 and of float32; TB/s of memory; MiB of L2.
PEAKS.add("A100-SXM-80GB", Peaks("NVIDIA A100-SXM4-80GB", 312, 156, 19.5, 2.04, 40 * MIB))
PEAKS.add("H100-SXM", Peaks("NVIDIA H100 80GB HBM3", 989, 494, 67, 3.35, 50 * MIB))
PEAKS.add("H100-PCIe", Peaks("NVIDIA H100 PCIe", 756, 378, 51, 2.0, 50 * MIB))
PEAKS.add("H200-SXM", Peaks("NVIDIA H200", 989, 494, 67, 4.8, 50 * MIB))
PEAKS.add("L4", Peaks("NVIDIA L4", 121, 60, 30, 0.30, 48 * MIB))
PEAKS.add("RTX-4090", Peaks("NVIDIA GeForce RTX 4090", 165, 82.6, 82.6, 1.008, 72 * MIB))

# What is measured on a busy machine may fall short of the ceiling by this factor.
WELL_ABOVE = 3.0
ABOVE_KEPT = 1.5  # ceilings of the cache are of a busy moment then, and measured again


def peaks_of(device_name: str | None) -> tuple[str, Peaks] | None:
    """Return the registered name and the peaks of a device, or None where it is not known."""
    for name, peaks in PEAKS.items():
        if device_name and re.fullmatch(peaks.pattern, device_name.strip()):
            return name, peaks
    return None


def peak_tflops(environment: Mapping[str, Any], dtype: str) -> float | None:
    """Datasheet peak for `dtype` on the machine of `environment` (of run.json), or None."""
    known = peaks_of(environment.get("device_name"))
    return known and known[1].tflops(dtype, environment.get("matmul_precision"))


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """What was measured, and when; `cached`: by an earlier run. None is unknown; GB: 10⁹ bytes."""

    matmul_tflops: Mapping[str, float | None] = field(default_factory=dict)
    copy_gbps: float | None = None
    read_gbps: float | None = None
    launch_us: float | None = None
    launch_cold_us: float | None = None
    cache_bytes: int | None = None
    measured: str | None = None
    cached: bool = False

    def starts_us(self, kernels: float | None, *, l2: str | None) -> float | None:
        """What starting the kernels of one call takes at least, in µs; None where unknown.

        On CUDA a cold call stands between events of its own, which take time once.
        """
        if kernels is None or self.launch_us is None:
            return None
        events_us = (self.launch_cold_us or 0.0) - self.launch_us if l2 == "cold" else 0.0
        return kernels * self.launch_us + max(0.0, events_us)


def ceilings_of(environment: Mapping[str, Any], threads: int = 1) -> Ceilings:
    """The ceilings in `environment` (of run.json) of a CPU with so many `threads`.

    Older runs have those of one number of threads.
    """
    found = environment.get("ceilings") or {}
    of_threads = found.get(str(threads))
    found = found | of_threads if isinstance(of_threads, dict) else found
    return Ceilings(
        **{item.name: found[item.name] for item in fields(Ceilings) if item.name in found}
    )


def flops(metrics: Mapping[str, Any]) -> int | None:
    """The executed FLOPs; the useful ones where an implementation does not declare them."""
    executed: int | None = metrics.get("flops_executed")
    return metrics.get("flops_useful") if executed is None else executed


def suspect(
    environment: Mapping[str, Any],
    dtype: str,
    threads: int,
    time_us: float | None,
    metrics: Mapping[str, Any],
    *,
    cached: bool = False,
) -> str | None:
    """Why a time cannot be right: beyond the peak FLOP rate or the memory's bandwidth. Or None.

    Traffic counts only where it exceeds the last cache: a smaller working set may never touch the
    memory. A device without a datasheet is held against what the run measured, with room for a busy
    moment; or against `cached` ceilings, too, with less.
    """
    work, bytes_min = flops(metrics), metrics.get("bytes_min") or 0
    if not time_us or not (work or bytes_min):
        return None  # no work that a limit could be applied to
    known, measured = peaks_of(environment.get("device_name")), ceilings_of(environment, threads)
    cache_bytes = measured.cache_bytes or (known[1].cache_bytes if known else None)
    if measured.cached and not cached:
        measured = Ceilings()
    most = ABOVE_KEPT if cached else WELL_ABOVE
    rate, gbps = (work or 0) / time_us / 1e6, bytes_min / time_us / 1e3
    peak = peak_tflops(environment, dtype)
    reached = measured.matmul_tflops.get(dtype)
    if known and peak and rate > peak:
        return (
            f"{rate:.4g} TFLOP/s executed, above the datasheet peak"
            f" of {peak:g} ({known[0]}, {dtype}): the time is wrong"
        )
    if not peak and reached and rate > most * reached:
        return _beyond(rate, "TFLOP/s executed", "large matmul", reached)
    if cache_bytes is None or bytes_min <= cache_bytes:
        return None
    if known and gbps > 1e3 * known[1].memory_tbps:
        return (
            f"{gbps / 1e3:.3g} TB/s at least, above the memory's {known[1].memory_tbps:g}"
            f" ({known[0]}): the time is wrong"
        )
    streamed = max(measured.read_gbps or 0.0, measured.copy_gbps or 0.0)
    if not known and streamed and gbps > most * streamed:
        return _beyond(gbps, "GB/s at least", "large copy or read", streamed)
    return None


def _beyond(rate: float, unit: str, what: str, reached: float) -> str:
    return (
        f"{rate:.3g} {unit}, {rate / reached:.0f} times what a {what} reached here"
        f" ({reached:.3g}): the time is wrong, or the work was not done"
    )
