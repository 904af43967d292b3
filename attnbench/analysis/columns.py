"""The columns of the records table, one row each: name, unit, kind, meaning, function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from attnbench.analysis import notes, roofline, times
from attnbench.base.registry import Registry
from attnbench.base.stats import median
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.record import Record

Kind = Literal["int", "float", "text"]
Value = int | float | str | None


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: what it is called, in which unit, what it means and where it comes from.

    `value(record, run)` returns None for what is not known, never 0.
    """

    name: str
    unit: str
    kind: Kind
    meaning: str
    value: Callable[[Record, Run], Any]


COLUMNS: Registry[Column] = Registry("column")


def column(
    name: str, kind: Kind, meaning: str, value: Callable[[Record, Run], Any], unit: str = ""
) -> None:
    """Register one column; the order of registration is the order in the table."""
    COLUMNS.add(name, Column(name=name, unit=unit, kind=kind, meaning=meaning, value=value))


def from_case(name: str, kind: Kind, meaning: str) -> None:
    """Register a column that is a field of the case, as its JSON writes it."""
    column(name, kind, meaning, lambda record, _: record.cell.case.to_json()[name])


def from_metrics(name: str, kind: Kind, unit: str, meaning: str) -> None:
    """Register a column that a probe or a prediction left in the record's metrics."""
    column(name, kind, meaning, lambda record, _: record.metrics.get(name), unit)


def _time_us(record: Record, _: Run | None = None) -> float | None:
    return times.time_us(record)


def _interval_end(end: int) -> Callable[[Record, Run], float | None]:
    def value(record: Record, _: Run) -> float | None:
        interval = times.interval_us(record)
        return None if interval is None else interval[end]

    return value


def _per_time(metric: str, per_us: float) -> Callable[[Record, Run], float | None]:
    """`metric` / median time, in the unit that is `per_us` a microsecond."""

    def value(record: Record, _: Run) -> float | None:
        amount, time_us = record.metrics.get(metric), _time_us(record)
        return None if amount is None or not time_us else amount / time_us / per_us

    return value


def _environment(key: str) -> Callable[[Record, Run], Any]:
    return lambda _, run: run.info.get("environment", {}).get(key)


def _device_name(record: Record, run: Run) -> str | None:
    environment = run.info.get("environment", {})
    # A run's environment describes one device; a case on another one has no name to give.
    described = environment.get("device", record.cell.case.device)
    return environment.get("device_name") if described == record.cell.case.device else None


def _suspect(record: Record, run: Run) -> str | None:
    executed = record.metrics.get("flops_executed")
    return limits.suspect(
        device_name=_device_name(record, run),
        dtype=record.cell.case.dtype,
        matmul_precision=_environment("matmul_precision")(record, run),
        time_us=_time_us(record),
        flops=record.metrics.get("flops_useful") if executed is None else executed,
        bytes_min=record.metrics.get("bytes_min"),
        measured=_place(record, run).ceilings,
    )


def _place(record: Record, run: Run) -> roofline.Place:
    environment = run.info.get("environment", {})
    return roofline.place(record.cell.case, record.metrics, _time_us(record), environment)


def from_place(name: str, kind: Kind, unit: str, meaning: str) -> None:
    """Register a column that says where the cell stands between the machine's limits."""
    column(name, kind, meaning, lambda record, run: getattr(_place(record, run), name), unit)


def _time_us_min(record: Record, _: Run) -> float | None:
    return min((sample.time_us for sample in record.kept), default=None)


def _e2e_us(record: Record, _: Run) -> float | None:
    return median(sample.e2e_us for sample in record.kept) if record.samples else None


def _of(function: Callable[[Record], Any]) -> Callable[[Record, Run], Any]:
    return lambda record, _: function(record)


def _processes(record: Record, _: Run) -> int | None:
    return len({sample.process for sample in record.samples}) or None


def _discarded(record: Record, _: Run) -> int | None:
    return len(record.samples) - len(record.kept) if record.samples else None


def _blocks(record: Record, _: Run) -> int | None:
    return max((len(sample.blocks_us) or 1 for sample in record.kept), default=None)


def _time_us_blocks(record: Record, _: Run) -> float | None:
    blocks = [us for sample in record.kept for us in sample.blocks_us or (sample.time_us,)]
    return median(blocks) if blocks else None


def _calls(record: Record, _: Run) -> int | None:
    return sum(sample.calls * (len(sample.blocks_us) or 1) for sample in record.kept) or None


def _spent_s(record: Record, _: Run) -> float | None:
    return sum(record.spent_s.values()) if record.spent_s else None


column("run_id", "text", "name of the run", lambda _, run: run.run_id)
column("case_id", "text", "hash of the case", lambda record, _: record.cell.case.case_id)
from_case("workload", "text", "attention, layer or decode")
column("impl", "text", "name of the implementation", lambda record, _: record.cell.impl)
from_case("pass", "text", "forward, backward or both")
from_case("device", "text", "cpu or cuda")
column("device_name", "text", "model of the device", _device_name)
from_case("dtype", "text", "element type of the inputs")
from_case("batch", "int", "batch size B")
from_case("heads", "int", "query heads H")
from_case("kv_heads", "int", "key/value heads G")
from_case("seq_len", "int", "queries L; for decode the context before the first new token")
from_case("kv_len", "int", "keys and values S")
from_case("head_dim", "int", "query/key head dimension D")
from_case("mask", "text", "which pairs are admitted; causal is bottom-right")
from_case("position", "text", "position encoding, with its base where given")
from_case("value_dim", "int", "value head dimension V")
from_case("width", "int", "model width E of a layer")
from_case("projection", "text", "kind of projection of a layer")
from_case("cache", "text", "how decoding keeps keys and values")
from_case("new_tokens", "int", "tokens generated after the context")
column("threads", "int", "CPU threads of the worker", _environment("threads"))
column("status", "text", "what became of the cell", lambda record, _: record.status)
column("reason", "text", "why it is not ok", lambda record, _: record.reason)
column("suspect", "text", "why the time cannot be right", _suspect)
column("time_us_median", "float", "median time per call (per token for decode)", _time_us, "µs")
column("time_us_ci_low", "float", "lower end of the median's 95 % interval", _interval_end(0), "µs")
column("time_us_ci_high", "float", "upper end of it", _interval_end(1), "µs")
column("time_us_min", "float", "fastest sample", _time_us_min, "µs")
column(
    "e2e_us_median",
    "float",
    "median host time from a call to its result, per call (per token for decode), without the"
    " flush; on CUDA, of one call made for it beside each sample",
    _e2e_us,
    "µs",
)
column("n_samples", "int", "timed observations that count", lambda record, _: len(record.kept))
from_metrics("flops_useful", "int", "FLOP", "what the admitted pairs need, flash-attention's way")
from_metrics("flops_executed", "int", "FLOP", "what the algorithm really multiplies")
from_metrics("flops_counted", "int", "FLOP", "what torch's FlopCounterMode saw")
from_metrics("flops_counted_source", "text", "", "dispatched (real matmuls) or formula")
column("tflops", "float", "useful FLOPs / median time", _per_time("flops_useful", 1e6), "TFLOP/s")
from_metrics("bytes_min", "int", "B", "least traffic: inputs read once, outputs written once")
column("gbps", "float", "least traffic / median time", _per_time("bytes_min", 1e3), "GB/s")
from_metrics("memory_peak_bytes", "int", "B", "highest allocation during the call")
from_metrics("memory_inputs_bytes", "int", "B", "held by the inputs")
from_metrics("memory_outputs_bytes", "int", "B", "held by the outputs")
from_metrics("memory_prepared_bytes", "int", "B", "held by what was built before the call")
from_metrics("memory_workspace_bytes", "int", "B", "peak − live before − outputs")
from_metrics("memory_predicted_bytes", "int", "B", "workspace predicted from the sizes alone")
from_metrics("error_max", "float", "", "largest absolute error against float64")
from_metrics("error_rmse", "float", "", "root mean square error against float64")
from_metrics(
    "kernel",
    "text",
    "",
    "kernels or ops of one call, attention ops first, then as they ran; eight at most",
)
from_metrics("compile_s", "float", "s", "compilation, outside the timed calls")
from_metrics("energy_j", "float", "J", "energy per call (per token for decode)")

# Beyond DESIGN's list; new columns go below, so that the ones above keep their places.
from_metrics("error_ratio", "float", "", "error / allowed error; right at 1 or below")
from_metrics("flops_note", "text", "", "where the three FLOP counts disagree, and why")
from_metrics("interruptions_per_s", "float", "1/s", "how often other work took a core away")
from_metrics("cpu_share", "float", "", "processor time of a thread / wall time of all turns")
column("notes", "text", "what to know before believing the time", _of(notes.notes))
column("unsteady", "text", "the serious ones among the notes, by name", _of(notes.unsteady))
from_metrics("kernel_count", "int", "", "kernels or ops of one call (decode: a whole generation)")
from_metrics("l2", "text", "", "cold or warm: the last cache before each sample")
column("interval", "text", "what it replicates: within_process, …", _of(times.replicated))
column("precision", "float", "half-width of the interval / time", _of(times.precision))
column("detectable", "float", "least difference that would show", _of(times.detectable))
column("processes", "int", "fresh processes that measured the cell", _processes)
column("n_discarded", "int", "samples that do not count, see notes", _discarded)
column("blocks", "int", "blocks of a turn, whose fastest is the sample", _blocks)
from_metrics("window", "int", "", "samples of which the fastest counts, see --min-time")
column(
    "time_us_blocks",
    "float",
    "median over all blocks of the turns that count",
    _time_us_blocks,
    "µs",
)
from_metrics("timer", "text", "", "host, events or graph")
from_metrics("stolen_share", "float", "", "processor time given to other guests / wall time")
from_metrics("throttled_share", "float", "", "time a CPU quota held the process back / wall time")
from_metrics("load_1m", "float", "", "load average of the machine at the cell's end")
from_metrics(
    "enqueue_us", "float", "µs", "host time to issue a call (per token for decode), on a GPU"
)
from_metrics("sm_mhz", "float", "MHz", "mean clock of the GPU right after the samples")
from_metrics("power_w", "float", "W", "power the GPU drew beside the samples")
from_metrics("temperature_c", "float", "°C", "temperature of the GPU beside the samples")
from_metrics("power_state", "text", "", "burst, or sustained: under the power cap")
from_metrics("throttle", "text", "", "what slowed the GPU's clock, and in how many blocks")
from_metrics("idle_power_w", "float", "W", "power before the energy was measured; not subtracted")
from_metrics(
    "memory_saved_bytes",
    "int",
    "B",
    "what autograd saves from forward to backward pass, beside inputs and what was prepared; part"
    " of the workspace, but for a saved output, or of what was prepared for a backward pass alone",
)
from_metrics("memory_predicted_miss", "float", "", "workspace / predicted − 1; 0 where both are 0")
from_metrics("sdpa_backend", "text", "", "backend that scaled_dot_product_attention took")
column("calls", "int", "timed calls over all samples", _calls)
column("spent_s", "float", "wall time of the cell, all stages", _spent_s, "s")
column("matmul_precision", "text", "highest: no TF32", _environment("matmul_precision"))
column("torch", "text", "version of torch", _environment("torch"))
column("created", "text", "when the run began", lambda _, run: run.info.get("created"))
from_place(
    "arithmetic_intensity",
    "float",
    "FLOP/B",
    "useful FLOPs / least traffic (bytes_min, which leaves out what an algorithm stores between,"
    " such as naive's score matrix)",
)
from_place(
    "fraction_of_compute_peak",
    "float",
    "",
    "executed FLOP rate (useful where executed is unknown) / that of a large matmul in this run",
)
from_place(
    "fraction_of_memory_peak",
    "float",
    "",
    "least traffic / time / rate of a large read in this run; what stays in a cache may exceed 1",
)
from_place(
    "bound",
    "text",
    "",
    "compute, memory or launch: whose least time is longest, of the executed FLOPs at the matmul's"
    " rate, of the least traffic at the read's, of starting every kernel; launch too where the host"
    " takes as long to issue a call as the device to run it",
)
from_place("peak_tflops_measured", "float", "TFLOP/s", "a large matmul of this dtype in this run")
from_place("peak_tflops_datasheet", "float", "TFLOP/s", "dense peak, where the device is known")
from_place("read_gbps_measured", "float", "GB/s", "a large read in this run")
from_place("copy_gbps_measured", "float", "GB/s", "a large copy in this run, read and written")
from_place("memory_gbps_datasheet", "float", "GB/s", "memory's, where the device is known")
from_place("launch_us_measured", "float", "µs", "the cheapest op, called back to back")
from_metrics("governor", "text", "", "what set the CPUs' frequency, at the cell's end")
from_metrics("cpu_quota", "float", "", "CPUs' worth of time granted, at the cell's end")
from_metrics(
    "memory_retained_bytes",
    "int",
    "B",
    "still held after the first call of all, beside its outputs; null for what compiles",
)
