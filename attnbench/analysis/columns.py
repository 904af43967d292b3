"""The columns of the records table, one row each: name, kind, unit, meaning, function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from attnbench.analysis import notes, times
from attnbench.base.registry import Registry
from attnbench.base.stats import median
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.schema.record import Record

ColumnKind = Literal["int", "float", "text"]
Bound = Literal["compute", "memory", "launch"]


@dataclass(frozen=True, kw_only=True)
class CellLimits:
    """One cell against its machine, all per unit (a call; a token for decode); None is unknown.

    The model is the roofline of Williams, Waterman and Patterson (CACM 2009) with a third limit,
    that every kernel must be started. `flops_executed` are the useful ones where an implementation
    does not declare them. All other fields are columns of the same name.
    """

    ceilings: limits.Ceilings
    flops_executed: int | None
    bytes_min: int | None
    arithmetic_intensity: float | None
    fraction_of_compute_peak: float | None
    fraction_of_memory_peak: float | None
    bound: Bound | None
    peak_tflops_measured: float | None
    peak_tflops_datasheet: float | None
    read_gbps_measured: float | None
    copy_gbps_measured: float | None
    memory_gbps_datasheet: float | None
    launch_us_measured: float | None


def cell_limits(
    case: Case, metrics: Mapping[str, Any], time_us: float | None, environment: Mapping[str, Any]
) -> CellLimits:
    """Compare one cell with the machine of `environment`; all is unknown on another device."""
    here = environment if environment.get("device", case.device) == case.device else {}
    ceilings, known = limits.ceilings_of(here), limits.peaks_of(here.get("device_name"))
    useful, executed = metrics.get("flops_useful"), metrics.get("flops_executed")
    executed = useful if executed is None else executed
    traffic, peak = metrics.get("bytes_min"), ceilings.matmul_tflops.get(case.dtype)
    kernels = metrics.get("kernel_count")  # of one call, which makes all the tokens of a decode
    least_us: dict[Bound, float | None] = {
        "compute": _quotient(executed, peak, per=1e-6),
        "memory": _quotient(traffic, ceilings.read_gbps, per=1e-3),
        "launch": None
        if kernels is None or ceilings.launch_us is None
        else kernels / (case.new_tokens or 1) * ceilings.launch_us,
    }
    return CellLimits(
        ceilings=ceilings,
        flops_executed=executed,
        bytes_min=traffic,
        arithmetic_intensity=_quotient(useful, traffic),
        fraction_of_compute_peak=_quotient(least_us["compute"], time_us),
        fraction_of_memory_peak=_quotient(least_us["memory"], time_us),
        bound=_bound(least_us, time_us, metrics.get("enqueue_us")),
        peak_tflops_measured=peak,
        peak_tflops_datasheet=limits.peak_tflops(here, case.dtype),
        read_gbps_measured=ceilings.read_gbps,
        copy_gbps_measured=ceilings.copy_gbps,
        memory_gbps_datasheet=1e3 * known[1].memory_tbps if known else None,
        launch_us_measured=ceilings.launch_us,
    )


def _bound(
    least_us: dict[Bound, float | None], time_us: float | None, enqueue_us: float | None
) -> Bound | None:
    """The limit that takes longest; unknown unless all are: the missing one might be it."""
    if times.launch_bound(enqueue_us, time_us):
        return "launch"
    known = {name: us for name, us in least_us.items() if us is not None}
    if not time_us or len(known) < len(least_us):
        return None
    return max(known, key=lambda name: known[name])


def _quotient(amount: float | None, other: float | None, per: float = 1.0) -> float | None:
    """Quotient × `per`; None where either is unknown, or the divisor is nothing."""
    return None if amount is None or not other else amount / other * per


@dataclass(frozen=True)
class TableRow:
    """One recorded cell, with what several columns are made of; computed once."""

    record: Record
    run: Run

    @cached_property
    def case(self) -> dict[str, Any]:
        """The fields of the case, as its JSON writes them."""
        return self.record.cell.case.to_json()

    @property
    def environment(self) -> dict[str, Any]:
        """What run.json says of the machine."""
        return self.run.info.get("environment", {})  # type: ignore[no-any-return]

    @cached_property
    def time_us(self) -> float | None:
        """The reported time."""
        return times.time_us(self.record)

    @cached_property
    def interval_us(self) -> tuple[float | None, float | None]:
        """The ends of its interval."""
        return times.interval_us(self.record) or (None, None)

    @cached_property
    def limits(self) -> CellLimits:
        """Where the cell stands between the machine's limits."""
        case, metrics = self.record.cell.case, self.record.metrics
        return cell_limits(case, metrics, self.time_us, self.environment)


Value = Callable[[TableRow], Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: what it is called, in which unit, what it means and where it comes from.

    `value(row)` returns None for what is not known, never 0.
    """

    name: str
    unit: str
    kind: ColumnKind
    meaning: str
    value: Value


COLUMNS: Registry[Column] = Registry("column")


def column(name: str, kind: ColumnKind, unit: str, meaning: str, value: Value) -> None:
    """Register one column; the order of registration is the order in the table."""
    COLUMNS.add(name, Column(name=name, unit=unit, kind=kind, meaning=meaning, value=value))


def from_record(
    name: str, kind: ColumnKind, unit: str, meaning: str, value: Callable[[Record], Any]
) -> None:
    """Register a column that is a function of the record."""
    column(name, kind, unit, meaning, lambda row: value(row.record))


def from_case(name: str, kind: ColumnKind, meaning: str) -> None:
    """Register a column that is a field of the case."""
    column(name, kind, "", meaning, lambda row: row.case[name])


def from_metrics(name: str, kind: ColumnKind, unit: str, meaning: str) -> None:
    """Register a column that a probe or a prediction left in the record's metrics."""
    column(name, kind, unit, meaning, lambda row: row.record.metrics.get(name))


def from_environment(name: str, kind: ColumnKind, meaning: str) -> None:
    """Register a column that is the same in all rows: a fact of the run's environment."""
    column(name, kind, "", meaning, lambda row: row.environment.get(name))


def from_limits(name: str, kind: ColumnKind, unit: str, meaning: str) -> None:
    """Register a column that says where the cell stands between the machine's limits."""
    column(name, kind, unit, meaning, lambda row: getattr(row.limits, name))


def _device_name(row: TableRow) -> str | None:
    # A run's environment describes one device; a case on another one has no name to give.
    here = row.environment.get("device", row.case["device"]) == row.case["device"]
    return row.environment.get("device_name") if here else None


def _suspect(row: TableRow) -> str | None:
    return limits.suspect(
        device_name=_device_name(row),
        dtype=row.case["dtype"],
        matmul_precision=row.environment.get("matmul_precision"),
        time_us=row.time_us,
        flops=row.limits.flops_executed,
        bytes_min=row.limits.bytes_min,
        measured=row.limits.ceilings,
    )


def _rate(metric: str, per_us: float) -> Value:
    """`metric` / median time, in the unit that is `per_us` a microsecond."""

    def value(row: TableRow) -> float | None:
        amount = row.record.metrics.get(metric)
        return None if amount is None or not row.time_us else amount / row.time_us / per_us

    return value


def _e2e_us(row: TableRow) -> float | None:
    return median(sample.e2e_us for sample in row.record.kept) if row.record.samples else None


def _time_us_batches(row: TableRow) -> float | None:
    batches = [us for sample in row.record.kept for us in sample.blocks_us or (sample.time_us,)]
    return median(batches) if batches else None


def _calls(row: TableRow) -> int | None:
    kept = row.record.kept
    return sum(sample.calls * (len(sample.blocks_us) or 1) for sample in kept) or None


column("run_id", "text", "", "name of the run", lambda row: row.run.run_id)
column("case_id", "text", "", "hash of the case", lambda row: row.record.cell.case.case_id)
from_case("workload", "text", "attention, layer or decode")
column("impl", "text", "", "name of the implementation", lambda row: row.record.cell.impl)
from_case("pass", "text", "forward, backward or both")
from_case("device", "text", "cpu or cuda")
column("device_name", "text", "", "model of the device", _device_name)
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
from_environment("threads", "int", "CPU threads of the worker")
column("status", "text", "", "what became of the cell", lambda row: row.record.status)
column("reason", "text", "", "why it is not ok", lambda row: row.record.reason)
column("suspect", "text", "", "why the time cannot be right", _suspect)
column(
    "time_us_median",
    "float",
    "µs",
    "median time per call (decode: per token)",
    lambda row: row.time_us,
)
column(
    "time_us_ci_low",
    "float",
    "µs",
    "lower end of its 95 % interval",
    lambda row: row.interval_us[0],
)
column("time_us_ci_high", "float", "µs", "upper end of it", lambda row: row.interval_us[1])
column(
    "time_us_min",
    "float",
    "µs",
    "fastest sample",
    lambda row: min((sample.time_us for sample in row.record.kept), default=None),
)
column(
    "e2e_us_median",
    "float",
    "µs",
    "median host time from a call to its result, per call (per token for decode), without the"
    " flush; on CUDA, of one call made for it beside each sample",
    _e2e_us,
)
column("n_samples", "int", "", "timed observations that count", lambda row: len(row.record.kept))
from_metrics("flops_useful", "int", "FLOP", "what the admitted pairs need, flash-attention's way")
from_metrics("flops_executed", "int", "FLOP", "what the algorithm really multiplies")
from_metrics("flops_counted", "int", "FLOP", "what torch's FlopCounterMode saw")
from_metrics("flops_counted_source", "text", "", "dispatched (real matmuls) or formula")
column("tflops", "float", "TFLOP/s", "useful FLOPs / median time", _rate("flops_useful", 1e6))
from_metrics("bytes_min", "int", "B", "least traffic: inputs read once, outputs written once")
column("gbps", "float", "GB/s", "least traffic / median time", _rate("bytes_min", 1e3))
from_metrics("memory_peak_bytes", "int", "B", "highest allocation during the call")
from_metrics("memory_inputs_bytes", "int", "B", "held by the inputs")
from_metrics("memory_outputs_bytes", "int", "B", "held by the outputs")
from_metrics("memory_prepared_bytes", "int", "B", "held by what was built before the call")
from_metrics("memory_workspace_bytes", "int", "B", "peak − live before − outputs")
from_metrics("memory_predicted_bytes", "int", "B", "workspace predicted from the sizes alone")
from_metrics("error_max", "float", "", "largest absolute error against float64")
from_metrics("error_rmse", "float", "", "root mean square error against float64")
from_metrics(
    "kernel", "text", "", "kernels or ops of one call, attention first, then as run; at most eight"
)
from_metrics("compile_s", "float", "s", "compilation, outside the timed calls")
from_metrics("energy_j", "float", "J", "energy per call (per token for decode)")

# Beyond DESIGN's list; new columns go below, so that the ones above keep their places.
from_metrics("error_ratio", "float", "", "error / allowed error; right at 1 or below")
from_metrics("flops_note", "text", "", "where the three FLOP counts disagree, and why")
from_metrics("interruptions_per_s", "float", "1/s", "how often other work took a core away")
from_metrics("cpu_share", "float", "", "processor time of a thread / wall time of all samples")
from_record("notes", "text", "", "what to know before believing the time", notes.notes)
from_record("unsteady", "text", "", "the serious ones among the notes, by name", notes.unsteady)
from_metrics("kernel_count", "int", "", "kernels or ops of one call (decode: a whole generation)")
from_metrics("l2", "text", "", "cold or warm: the last cache before each sample")
from_record("interval", "text", "", "what it replicates: within_process, …", times.replicated)
from_record("precision", "float", "", "half-width of the interval / time", times.precision)
from_record("detectable", "float", "", "least difference that would show", times.detectable)
column(
    "processes",
    "int",
    "",
    "fresh processes that measured the cell",
    lambda row: len({sample.process for sample in row.record.samples}) or None,
)
column(
    "n_discarded",
    "int",
    "",
    "samples that do not count, see notes",
    lambda row: len(row.record.samples) - len(row.record.kept) if row.record.samples else None,
)
column(
    "blocks",
    "int",
    "",
    "batches of a sample, of which the fastest is its time",
    lambda row: max((len(sample.blocks_us) or 1 for sample in row.record.kept), default=None),
)
from_metrics("window", "int", "", "samples of which the fastest counts, see --min-time")
column(
    "time_us_blocks", "float", "µs", "median over all batches of the samples that count",
    _time_us_batches,
)  # fmt: skip
from_metrics("timer", "text", "", "host, events or graph")
from_metrics("stolen_share", "float", "", "processor time given to other guests / wall time")
from_metrics("throttled_share", "float", "", "time a CPU quota held the process back / wall time")
from_metrics("load_1m", "float", "", "load average of the machine at the cell's end")
from_metrics("enqueue_us", "float", "µs", "host time to issue a call (decode: per token), on a GPU")
from_metrics("sm_mhz", "float", "MHz", "mean clock of the GPU right after the samples")
from_metrics("power_w", "float", "W", "power the GPU drew beside the samples")
from_metrics("temperature_c", "float", "°C", "temperature of the GPU beside the samples")
from_metrics("power_state", "text", "", "burst, or sustained: under the power cap")
from_metrics("throttle", "text", "", "what slowed the GPU's clock, and in how many batches")
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
column("calls", "int", "", "timed calls over all samples", _calls)
column(
    "spent_s",
    "float",
    "s",
    "wall time of the cell, all stages",
    lambda row: sum(row.record.spent_s.values()) if row.record.spent_s else None,
)
from_environment("matmul_precision", "text", "highest: no TF32")
from_environment("torch", "text", "version of torch")
column("created", "text", "", "when the run began", lambda row: row.run.info.get("created"))
from_limits(
    "arithmetic_intensity",
    "float",
    "FLOP/B",
    "useful FLOPs / least traffic (bytes_min, which leaves out what an algorithm stores between,"
    " such as naive's score matrix)",
)
from_limits(
    "fraction_of_compute_peak",
    "float",
    "",
    "executed FLOP rate (useful where executed is unknown) / that of a large matmul in this run",
)
from_limits(
    "fraction_of_memory_peak",
    "float",
    "",
    "least traffic / time / rate of a large read in this run; what stays in a cache may exceed 1",
)
from_limits(
    "bound",
    "text",
    "",
    "compute, memory or launch: whose least time is longest, of the executed FLOPs at the matmul's"
    " rate, of the least traffic at the read's, of starting every kernel; launch too where the host"
    " takes as long to issue a call as the device to run it",
)
from_limits("peak_tflops_measured", "float", "TFLOP/s", "a large matmul of this dtype in this run")
from_limits("peak_tflops_datasheet", "float", "TFLOP/s", "dense peak, where the device is known")
from_limits("read_gbps_measured", "float", "GB/s", "a large read in this run")
from_limits("copy_gbps_measured", "float", "GB/s", "a large copy in this run, read and written")
from_limits("memory_gbps_datasheet", "float", "GB/s", "memory's, where the device is known")
from_limits("launch_us_measured", "float", "µs", "the cheapest op, called back to back")
from_metrics("governor", "text", "", "what set the CPUs' frequency, at the cell's end")
from_metrics("cpu_quota", "float", "", "CPUs' worth of time granted, at the cell's end")
from_metrics(
    "memory_retained_bytes",
    "int",
    "B",
    "still held after the first call of all, beside its outputs; null for what compiles",
)
from_metrics("memory_predicted_source", "text", "", "formula (exact), or estimate (simple law)")
