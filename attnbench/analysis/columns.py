"""The columns of the records table, one row each: name, kind, unit, meaning, function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

from attnbench.analysis import notes, pairs, times
from attnbench.base.parameters import base_name
from attnbench.base.registry import Registry
from attnbench.base.stats import median
from attnbench.execution.store import Run
from attnbench.machine import limits
from attnbench.schema.case import Case
from attnbench.schema.record import Record
from attnbench.theory.masks import mask_block_density, mask_density
from attnbench.theory.traits import TRAITS

ColumnKind = Literal["int", "float", "text"]


@dataclass(frozen=True)
class TableRow:
    """One recorded cell, with what several columns are made of; computed once."""

    record: Record
    run: Run

    @cached_property
    def case(self) -> dict[str, Any]:
        """The fields of the case, as its JSON writes them."""
        return self.record.cell.case.to_json()

    @cached_property
    def environment(self) -> dict[str, Any]:
        """The facts of its machine in run.json."""
        return self.run.environment_of(self.record)

    @property
    def implementation(self) -> dict[str, Any]:
        """What run.json says of the implementation; empty where it says nothing."""
        name = base_name(self.record.cell.impl)
        rows = self.run.info.get("implementations") or []
        return next((row for row in rows if row.get("name") == name), {})

    @cached_property
    def time_us(self) -> float | None:
        """The reported time."""
        return times.time_us(self.record)

    @cached_property
    def interval_us(self) -> tuple[float | None, float | None]:
        """The ends of its interval."""
        return times.interval_us(self.record) or (None, None)

    @cached_property
    def limits(self) -> dict[str, Any]:
        """The cell against its machine, by column; all is unknown on another device.

        The model is the roofline of Williams, Waterman and Patterson (CACM 2009) with a third
        limit, that every kernel must be started. Times are per unit: a call, or a token of decode.
        """
        case, metrics = self.record.cell.case, self.record.metrics
        here = times.described(self.environment, case.device)
        ceilings = limits.ceilings_of(here, case.threads)
        known = limits.peaks_of(here.get("device_name"))
        traffic, peak = metrics.get("bytes_min"), ceilings.matmul_tflops.get(case.dtype)
        # Of one call: all the tokens of a decode.
        starts_us = ceilings.starts_us(metrics.get("kernel_count"), l2=metrics.get("l2"))
        least_us = {
            "compute": _quotient(limits.flops(metrics), peak, per=1e-6),
            "memory": _quotient(traffic, ceilings.read_gbps, per=1e-3),
            "launch": None if starts_us is None else starts_us / (case.new_tokens or 1),
        }
        return {
            "arithmetic_intensity": _quotient(metrics.get("flops_useful"), traffic),
            "fraction_of_compute_peak": _quotient(least_us["compute"], self.time_us),
            "fraction_of_memory_peak": _quotient(least_us["memory"], self.time_us),
            "bound": "launch"
            if times.launch_bound(self.record)
            else _bound(least_us, self.time_us),
            "peak_tflops_measured": peak,
            "peak_tflops_datasheet": limits.peak_tflops(here, case.dtype),
            "read_gbps_measured": ceilings.read_gbps,
            "copy_gbps_measured": ceilings.copy_gbps,
            "memory_gbps_datasheet": 1e3 * known[1].memory_tbps if known else None,
            "launch_us_measured": ceilings.launch_us,
            "ceilings_measured": ceilings.measured,
        }


def _bound(least_us: dict[str, float | None], time_us: float | None) -> str | None:
    """The limit that takes longest; unknown unless all are: the missing one might be it."""
    known = {name: us for name, us in least_us.items() if us is not None}
    all_known = time_us and len(known) == len(least_us)
    return max(known, key=lambda name: known[name]) if all_known else None


def _quotient(amount: float | None, other: float | None, per: float = 1.0) -> float | None:
    """Quotient × `per`; None where either is unknown, or the divisor is nothing."""
    return None if amount is None or not other else amount / other * per


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


def _from(
    source: Callable[[TableRow], Mapping[str, Any]],
) -> Callable[[str, ColumnKind, str, str], None]:
    """A way to register columns that are the entry of their name in `source(row)`."""
    return lambda name, kind, unit, meaning: column(
        name, kind, unit, meaning, lambda row: source(row).get(name)
    )


def _of_record(
    name: str, kind: ColumnKind, unit: str, meaning: str, value: Callable[[Record], Any]
) -> None:
    column(name, kind, unit, meaning, lambda row: value(row.record))


case = _from(lambda row: row.case)
metric = _from(lambda row: row.record.metrics)  # what a probe or a prediction left
environment = _from(lambda row: row.environment)  # the same in all rows
limit = _from(lambda row: row.limits)


def _rate(row: TableRow, name: str, per_us: float) -> float | None:
    """A metric / median time, in the unit that is `per_us` a microsecond."""
    rate = _quotient(row.record.metrics.get(name), row.time_us)
    return None if rate is None else rate / per_us


def _batches_us(record: Record) -> list[list[float]]:
    """The times of the batches of each sample that counts."""
    return [list(sample.blocks_us or (sample.time_us,)) for sample in record.kept]


column("run_id", "text", "", "name of the run", lambda row: row.run.run_id)
_of_record("case_id", "text", "", "hash of the case", lambda r: r.cell.case.case_id)
case("workload", "text", "", "attention, layer, decode or recurrent")
_of_record("impl", "text", "", "name of the implementation", lambda r: r.cell.impl)
case("pass", "text", "", "forward, backward or both")
case("device", "text", "", "cpu or cuda")
column(
    "device_name", "text", "", "model of the device",
    lambda row: times.described(row.environment, row.case["device"]).get("device_name"),
)  # fmt: skip
case("dtype", "text", "", "element type of the inputs")
case("batch", "int", "", "batch size B")
case("heads", "int", "", "query heads H")
case("kv_heads", "int", "", "key/value heads G")
case("seq_len", "int", "", "queries L; for decode the context before the first new token")
case("kv_len", "int", "", "keys and values S")
case("head_dim", "int", "", "query/key head dimension D")
case("mask", "text", "", "which pairs are admitted; causal is bottom-right")
case("position", "text", "", "position encoding, with the parameters that are not its defaults")
case("value_dim", "int", "", "value head dimension V")
case("width", "int", "", "model width E, of all workloads but attention")
case("projection", "text", "", "kind of projection of a layer")
case("cache", "text", "", "how decoding keeps keys and values")
case("new_tokens", "int", "", "tokens generated after the context")
case("threads", "int", "", "CPU threads of the timed calls; 1 on a GPU")
_of_record("status", "text", "", "what became of the cell", lambda r: r.status)
_of_record("reason", "text", "", "why it is not ok", lambda r: r.reason)
column(
    "suspect", "text", "", "why the time cannot be right",
    lambda row: times.suspect(row.record, row.environment, row.time_us),
)  # fmt: skip
column(
    "time_us_median",
    "float",
    "µs",
    "time per call (decode: per token): on a CPU the low end of its samples, on a GPU their median",
    lambda r: r.time_us,
)
column(
    "time_us_ci_low", "float", "µs", "lower end of its 95 % interval", lambda r: r.interval_us[0]
)
column("time_us_ci_high", "float", "µs", "upper end of it", lambda r: r.interval_us[1])
_of_record(
    "time_us_min", "float", "µs", "fastest sample",
    lambda r: min((s.time_us for s in r.kept), default=None),
)  # fmt: skip
_of_record(
    "e2e_us_median", "float", "µs",
    "median host time from a call to its result, per call (per token for decode), without the"
    " flush; on CUDA, of one call made for it beside each sample",
    lambda r: median(s.e2e_us for s in r.kept) if r.samples else None,
)  # fmt: skip
_of_record("n_samples", "int", "", "timed observations that count", lambda r: len(r.kept))
metric("flops_useful", "int", "FLOP", "the least that the method needs, flash-attention's way")
metric("flops_executed", "int", "FLOP", "what the algorithm really multiplies")
metric("flops_counted", "int", "FLOP", "what torch's FlopCounterMode saw")
metric("flops_counted_source", "text", "", "dispatched (real matmuls) or formula")
column(
    "tflops", "float", "TFLOP/s", "useful FLOPs / median time",
    lambda row: _rate(row, "flops_useful", 1e6),
)  # fmt: skip
metric("bytes_min", "int", "B", "least traffic: inputs read once, outputs written once")
column(
    "gbps", "float", "GB/s", "least traffic / median time",
    lambda row: _rate(row, "bytes_min", 1e3),
)  # fmt: skip
metric("memory_peak_bytes", "int", "B", "highest allocation during the call")
metric("memory_inputs_bytes", "int", "B", "held by the inputs")
metric("memory_outputs_bytes", "int", "B", "held by the outputs")
metric("memory_prepared_bytes", "int", "B", "held by what was built before the call")
metric("memory_workspace_bytes", "int", "B", "peak − live before − outputs")
metric("memory_predicted_bytes", "int", "B", "workspace predicted from the sizes alone, if exactly")
metric("error_max", "float", "", "largest absolute error against float64")
metric("error_rmse", "float", "", "root mean square error against float64")
metric(
    "kernel", "text", "", "kernels or ops of one call, attention first, then as run; at most eight"
)
metric("compile_s", "float", "s", "compilation, outside the timed calls")
metric(
    "energy_j", "float", "J",
    "energy per call (per token for decode) in a loop with warm caches, whatever l2 says",
)  # fmt: skip

# Beyond DESIGN's list; new columns go below, so that the ones above keep their places.
metric("error_ratio", "float", "", "error / allowed error; right at 1 or below")
metric(
    "reuses_output", "text", "",
    "whether each call returns the same memory: no, yes, or declared; null where outputs are above"
    " 64 MiB, and in layers and decoding",
)  # fmt: skip
metric("flops_note", "text", "", "where the three FLOP counts disagree, and why")
metric("interruptions_per_s", "float", "1/s", "how often other work took a core away")
metric("cpu_share", "float", "", "processor time of a thread / wall time of all samples")
metric("full_speed_share", "float", "", "how often a fixed loop ran at the core's fastest speed")
_of_record("notes", "text", "", "what to know before believing the time", notes.notes)
_of_record(
    "unsteady", "text", "", "why the error of the time has no bound, by name", notes.unsteady
)
metric("kernel_count", "int", "", "kernels or ops of one call (decode: a whole generation)")
metric("device_waits", "int", "", "how often the host waits for the GPU in one call")
metric("kernel_note", "text", "", "why kernel or kernel_count is not known")
metric("l2", "text", "", "cold or warm: the last cache before each sample")
_of_record("interval", "text", "", "what it replicates: within_process, …", times.replicated)
_of_record("precision", "float", "", "half-width of the interval / time", times.precision)
_of_record("detectable", "float", "", "least difference that would show", pairs.detectable)
_of_record(
    "processes", "int", "", "fresh processes that measured the cell",
    lambda r: len({s.process for s in r.samples}) or None,
)  # fmt: skip
_of_record(
    "n_discarded", "int", "", "samples that do not count, see notes",
    lambda r: len(r.samples) - len(r.kept) if r.samples else None,
)  # fmt: skip
_of_record(
    "blocks", "int", "", "batches of a sample, of which the fastest is its time",
    lambda r: max(map(len, _batches_us(r)), default=None),
)  # fmt: skip
metric("window", "int", "", "samples of which the fastest counts, see --min-time")
_of_record(
    "time_us_blocks", "float", "µs", "median over all batches of the samples that count",
    lambda r: median(chain.from_iterable(_batches_us(r))) if r.samples else None,
)  # fmt: skip
metric("timer", "text", "", "host, events or graph")
metric("stolen_share", "float", "", "processor time given to other guests / wall time")
metric("throttled_share", "float", "", "time a CPU quota held the process back / wall time")
metric("load_1m", "float", "", "load average of the machine at the cell's end")
metric("enqueue_us", "float", "µs", "host time to issue a call (decode: per token), on a GPU")
metric(
    "hidden_us", "float", "µs",
    "part of enqueue_us in which the device was kept busy before the timed call",
)  # fmt: skip
metric("sm_mhz", "float", "MHz", "mean clock of the GPU, read after each sample")
metric("power_w", "float", "W", "mean power the GPU drew, read after each sample")
metric("temperature_c", "float", "°C", "mean temperature of the GPU, read after each sample")
metric("power_state", "text", "", "burst, or sustained: under the power cap")
metric("throttle", "text", "", "what slowed the GPU's clock, and after how many of the samples")
metric("idle_power_w", "float", "W", "power before the energy was measured; not subtracted")
metric(
    "memory_saved_bytes", "int", "B",
    "what autograd saves from forward to backward pass, beside inputs and what was prepared; part"
    " of the workspace, but for a saved output, or of what was prepared for a backward pass alone",
)  # fmt: skip
metric("sdpa_backend", "text", "", "backend that scaled_dot_product_attention took")
_of_record(
    "calls", "int", "", "timed calls over all samples",
    lambda r: sum(sample.calls * (len(sample.blocks_us) or 1) for sample in r.kept) or None,
)  # fmt: skip
_of_record(
    "spent_s", "float", "s", "wall time of the cell, all stages",
    lambda r: sum(r.spent_s.values()) or None,
)  # fmt: skip
environment("matmul_precision", "text", "", "highest: no TF32")
environment("torch", "text", "", "version of torch")
environment("node", "text", "", "node of the Ray cluster that measured the cell")
column("created", "text", "", "when the run began", lambda row: row.run.info.get("created"))
limit(
    "arithmetic_intensity", "float", "FLOP/B",
    "useful FLOPs / least traffic (bytes_min, which leaves out what an algorithm stores between,"
    " such as naive's score matrix)",
)  # fmt: skip
limit(
    "fraction_of_compute_peak", "float", "",
    "executed FLOP rate (useful where executed is unknown) / that of a large matmul here",
)  # fmt: skip
limit(
    "fraction_of_memory_peak", "float", "",
    "least traffic / time / rate of a large read here; what stays in a cache may exceed 1",
)  # fmt: skip
limit(
    "bound", "text", "",
    "compute, memory or launch: whose least time is longest, of the executed FLOPs at the matmul's"
    " rate, of the least traffic at the read's, of starting every kernel; launch too where the host"
    " is still issuing a call when the device is done with what was issued before",
)  # fmt: skip
limit("peak_tflops_measured", "float", "TFLOP/s", "a large matmul of this dtype")
limit("peak_tflops_datasheet", "float", "TFLOP/s", "dense peak, where the device is known")
limit("read_gbps_measured", "float", "GB/s", "a large read")
limit("copy_gbps_measured", "float", "GB/s", "a large copy, read and written")
limit("memory_gbps_datasheet", "float", "GB/s", "memory's, where the device is known")
limit("launch_us_measured", "float", "µs", "the cheapest op, called back to back")
metric("governor", "text", "", "what set the CPUs' frequency, at the cell's end")
metric("cpu_quota", "float", "", "CPUs' worth of time granted, at the cell's end")
metric(
    "cache_bytes", "int", "B",
    "what decoding keeps between steps, once all new tokens are in it: keys, values, scales, block"
    " table",
)  # fmt: skip
case("query_tokens", "int", "", "tokens that a step of decoding takes at once; 1 elsewhere")
case("layers", "int", "", "layers one after another")
column(
    "family", "text", "", "exact, sparse, linear, low-rank or recurrent",
    lambda row: row.implementation.get("family"),
)  # fmt: skip
metric("parameters", "text", "", "the implementation's own, such as window=256")
metric(
    "approx_error", "float", "",
    "distance of the output from exact attention / its size, root mean squares, on normal inputs;"
    " of implementations that compute something else, and of caches that round",
)  # fmt: skip
metric(
    "approx_error_local", "float", "",
    "the same on inputs that vary slowly, whose queries have most of their weight near their place",
)  # fmt: skip
metric(
    "memory_retained_bytes", "int", "B",
    "still held after the first call of all, beside its outputs; null for what compiles",
)  # fmt: skip
metric("core_speeds", "text", "", "the core's speeds: the loop's time, its share, the mean stay")
limit("ceilings_measured", "text", "", "when the measured limits were taken, at most a day before")
metric("pinned_cpu", "text", "", "the CPU that its process could not leave, see --threads")
metric("memory_bound_bytes", "int", "B", "about the workspace, by sizes alone: what has to be free")


def _density(of: Callable[[Case], float]) -> Callable[[Record], float | None]:
    """Of workloads that have a square of queries and keys: not of single tokens or a network."""

    def value(record: Record) -> float | None:
        traits = TRAITS.get(record.cell.case.workload)
        return of(record.cell.case) if traits.heads and traits.unit == "call" else None

    return value


_of_record(
    "mask_density", "float", "", "pairs that the mask admits / all pairs", _density(mask_density)
)
_of_record(
    "mask_block_density", "float", "",
    "blocks of 128 queries and 128 keys that hold an admitted pair / all such blocks: what is left"
    " of the work for a kernel that skips empty blocks",
    _density(mask_block_density),
)  # fmt: skip
metric(
    "mask_build_us", "float", "µs",
    "what preparing the call took to make its mask, or the blocks of it, once; part of no time;"
    " null where it made none",
)  # fmt: skip
