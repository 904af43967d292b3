"""The GPUs that are simulated: rates and sizes by their datasheets, latencies by rule of thumb."""

from __future__ import annotations

from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One GPU and the host that it sits in. Rates are what large kernels reach, not peaks.

    `kernel_us` is the shortest a kernel takes on the device, `op_us` what torch takes to issue one,
    `tick_us` the step of event times. `context_s`, `load_s`, `plan_s` and `compile_s` are what the
    host waits for at the first use of the device, of a kernel, of a cuDNN plan, and of a compiled
    function. `import_s` is a process of its own until torch is there. `mhz` is the clock at which
    `torch.cuda._sleep` counts. `triton` says whether there are Triton and a C compiler.
    """

    name: str
    capability: tuple[int, int]
    half_tflops: float
    single_tflops: float
    double_tflops: float
    memory_gbps: float
    cache_gbps: float
    cache_bytes: int
    memory_bytes: int
    mhz: float
    kernel_us: float = 2.0
    op_us: float = 4.0
    tick_us: float = 1.0
    context_s: float = 1.2
    import_s: float = 4.0
    load_s: float = 0.003
    plan_s: float = 0.45
    compile_s: float = 20.0
    triton: bool = True

    @property
    def tflops(self) -> dict[str, float]:
        """TFLOP/s by dtype."""
        return {
            "bfloat16": self.half_tflops,
            "float16": self.half_tflops,
            "float32": self.single_tflops,
            "float64": self.double_tflops,
        }


PROFILES = {
    "H100": Profile(
        name="NVIDIA H100 80GB HBM3", capability=(9, 0), half_tflops=600, single_tflops=45,
        double_tflops=25, memory_gbps=2900, cache_gbps=6000, cache_bytes=50 * MIB,
        memory_bytes=79 * GIB, mhz=1755,
    ),
    "H200": Profile(
        name="NVIDIA H200", capability=(9, 0), half_tflops=600, single_tflops=45,
        double_tflops=25, memory_gbps=4200, cache_gbps=6000, cache_bytes=50 * MIB,
        memory_bytes=139 * GIB, mhz=1755,
    ),
    "A100": Profile(
        name="NVIDIA A100-SXM4-80GB", capability=(8, 0), half_tflops=220, single_tflops=17,
        double_tflops=9, memory_gbps=1750, cache_gbps=4000, cache_bytes=40 * MIB,
        memory_bytes=79 * GIB, mhz=1410, tick_us=1.024, op_us=5.0,
    ),
    "RTX4090": Profile(
        name="NVIDIA GeForce RTX 4090", capability=(8, 9), half_tflops=150, single_tflops=60,
        double_tflops=1.2, memory_gbps=930, cache_gbps=5000, cache_bytes=72 * MIB,
        memory_bytes=23 * GIB, mhz=2520, tick_us=1.024, op_us=3.0, triton=False,
    ),
    "L4": Profile(
        name="NVIDIA L4", capability=(8, 9), half_tflops=60, single_tflops=15,
        double_tflops=0.4, memory_gbps=260, cache_gbps=1500, cache_bytes=48 * MIB,
        memory_bytes=22 * GIB, mhz=2040, tick_us=1.024, op_us=6.0, triton=False,
    ),
}  # fmt: skip
