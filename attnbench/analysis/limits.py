"""Datasheet peaks of known GPUs, and the reason why a measurement beyond them is wrong."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from attnbench.registry import Registry

MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Peaks:
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


def _add(name: str, pattern: str, tflops: tuple[float, float, float], tbps: float, l2: int) -> None:
    """Register a device; `tflops` are those of 16-bit floats, TF32 and float32, `l2` is in MiB."""
    half, tf32, single = tflops
    PEAKS.add(
        name,
        Peaks(
            pattern=pattern,
            half_tflops=half,
            tf32_tflops=tf32,
            single_tflops=single,
            memory_tbps=tbps,
            cache_bytes=l2 * MIB,
        ),
    )


# NVIDIA's datasheets, without 2:4 sparsity; for the RTX card the shader rates are left aside.
_add("A100-SXM-80GB", r"NVIDIA A100-SXM4-80GB", (312, 156, 19.5), 2.04, 40)
_add("H100-SXM", r"NVIDIA H100 80GB HBM3", (989, 494, 67), 3.35, 50)
_add("H100-PCIe", r"NVIDIA H100 PCIe", (756, 378, 51), 2.0, 50)
_add("H200-SXM", r"NVIDIA H200", (989, 494, 67), 4.8, 50)
_add("L4", r"NVIDIA L4", (121, 60, 30), 0.30, 48)
_add("RTX-4090", r"NVIDIA GeForce RTX 4090", (165, 82.6, 82.6), 1.008, 72)


# A matmul measured on a busy machine may fall short of the ceiling by this factor.
WELL_ABOVE = 3.0


def peaks_of(device_name: str | None) -> tuple[str, Peaks] | None:
    """Return the registered name and the peaks of a device, or None where it is not known."""
    for name, peaks in PEAKS.items():
        if device_name and re.fullmatch(peaks.pattern, device_name.strip()):
            return name, peaks
    return None


def suspect(
    *,
    device_name: str | None,
    dtype: str,
    matmul_precision: str | None,
    time_us: float | None,
    flops: int | None,
    bytes_min: int | None,
    measured_tflops: float | None = None,
) -> str | None:
    """Why a time cannot be right: beyond the peak FLOP rate or the memory's bandwidth. Or None.

    `flops` is what was executed in `time_us`. Traffic counts only where it exceeds the last
    cache: a smaller working set may never touch the memory. A device whose peak is not known is
    held against `measured_tflops`, what a large matmul reached, with room for a busy moment.
    """
    known = peaks_of(device_name)
    if not time_us:
        return None
    if known is None:
        return _above_matmul(flops / time_us / 1e6 if flops else 0.0, measured_tflops)
    name, peaks = known
    peak = peaks.tflops(dtype, matmul_precision)
    rate = flops / time_us / 1e6 if flops else 0.0
    if peak is not None and rate > peak:
        return (
            f"{rate:.4g} TFLOP/s executed, above the datasheet peak"
            f" of {peak:g} ({name}, {dtype}): the time is wrong"
        )
    traffic = bytes_min / time_us / 1e6 if bytes_min and bytes_min > peaks.cache_bytes else 0.0
    if traffic > peaks.memory_tbps:
        return (
            f"{traffic:.3g} TB/s at least, above the memory's {peaks.memory_tbps:g}"
            f" ({name}): the time is wrong"
        )
    return None


def _above_matmul(rate: float, measured_tflops: float | None) -> str | None:
    if measured_tflops is None or rate <= WELL_ABOVE * measured_tflops:
        return None
    return (
        f"{rate:.3g} TFLOP/s executed, {rate / measured_tflops:.0f} times what a large matmul"
        f" reached here ({measured_tflops:.3g}): the time is wrong, or the work was not done"
    )


def peak_tflops(environment: dict[str, Any], dtype: str) -> float | None:
    """Datasheet peak for `dtype` on the machine of `environment` (of run.json), or None."""
    known = peaks_of(environment.get("device_name"))
    return known and known[1].tflops(dtype, environment.get("matmul_precision"))
