"""What a device can do at most, measured or by its datasheet, and why a time beyond it is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from attnbench.base.registry import Registry

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


# What is measured on a busy machine may fall short of the ceiling by this factor.
WELL_ABOVE = 3.0


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
    """What was measured at the start of a run; None is unknown. GB/s are 10⁹ bytes a second."""

    matmul_tflops: Mapping[str, float | None] = field(default_factory=dict)
    copy_gbps: float | None = None
    read_gbps: float | None = None
    launch_us: float | None = None
    cache_bytes: int | None = None


def ceilings_of(environment: Mapping[str, Any]) -> Ceilings:
    """The ceilings in `environment` (of run.json); older runs hold the matmul's alone."""
    found = environment.get("ceilings") or {"matmul_tflops": environment.get("matmul_tflops")}
    known = {name: value for name, value in found.items() if name in _CEILINGS}
    return Ceilings(**(known | {"matmul_tflops": found.get("matmul_tflops") or {}}))


_CEILINGS = {item.name for item in fields(Ceilings)}


def suspect(
    *,
    device_name: str | None,
    dtype: str,
    matmul_precision: str | None,
    time_us: float | None,
    flops: int | None,
    bytes_min: int | None,
    measured: Ceilings | None = None,
) -> str | None:
    """Why a time cannot be right: beyond the peak FLOP rate or the memory's bandwidth. Or None.

    `flops` is what was executed in `time_us`. Traffic counts only where it exceeds the last
    cache: a smaller working set may never touch the memory. A device without a datasheet is held
    against what was `measured` in the run, with room for a busy moment.
    """
    if not time_us:
        return None
    known, measured = peaks_of(device_name), measured or Ceilings()
    rate = flops / time_us / 1e6 if flops else 0.0
    peak = known and known[1].tflops(dtype, matmul_precision)
    if known is None or peak is None:
        reason = _above_matmul(rate, measured.matmul_tflops.get(dtype))
    else:
        reason = _above_peak(rate, peak, f"{known[0]}, {dtype}")
    gbps = (bytes_min or 0) / time_us / 1e3
    if known is None:
        return reason or _above_streaming(gbps, bytes_min or 0, measured)
    return reason or _above_memory(gbps, bytes_min or 0, *known)


def _above_peak(rate: float, peak: float, where: str) -> str | None:
    if rate <= peak:
        return None
    return (
        f"{rate:.4g} TFLOP/s executed, above the datasheet peak"
        f" of {peak:g} ({where}): the time is wrong"
    )


def _above_matmul(rate: float, reached: float | None) -> str | None:
    if reached is None or rate <= WELL_ABOVE * reached:
        return None
    return (
        f"{rate:.3g} TFLOP/s executed, {rate / reached:.0f} times what a large matmul"
        f" reached here ({reached:.3g}): the time is wrong, or the work was not done"
    )


def _above_memory(gbps: float, bytes_min: int, name: str, peaks: Peaks) -> str | None:
    if bytes_min <= peaks.cache_bytes or gbps <= 1e3 * peaks.memory_tbps:
        return None
    return (
        f"{gbps / 1e3:.3g} TB/s at least, above the memory's {peaks.memory_tbps:g}"
        f" ({name}): the time is wrong"
    )


def _above_streaming(gbps: float, bytes_min: int, measured: Ceilings) -> str | None:
    reached = max(measured.read_gbps or 0.0, measured.copy_gbps or 0.0)
    if not reached or measured.cache_bytes is None or bytes_min <= measured.cache_bytes:
        return None
    if gbps <= WELL_ABOVE * reached:
        return None
    return (
        f"{gbps:.3g} GB/s at least, {gbps / reached:.0f} times what a large copy or read"
        f" reached here ({reached:.3g}): the time is wrong, or the work was not done"
    )
