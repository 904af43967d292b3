"""What is done to modules in the processes of a rehearsal, right after they have been imported."""

from dataclasses import replace
from typing import Any

from tests.rehearsal.device import SLOWER


def simulate_gpu(torch: Any) -> None:
    """From now on CUDA is simulated."""
    from tests.rehearsal import cuda

    cuda.install()


def shrink_preset(presets: Any) -> None:
    """One length of each axis of the preset `gpu`, shorter by as much as the GPU is slower."""
    preset = presets.PRESETS.get("gpu")
    every = [axes.values["seq_lens"] for axes in preset.sweeps]
    lengths = [tuple(round(n / SLOWER) for n in lens[-2:-1]) for lens in every]
    sweeps = tuple(map(lambda axes, n: axes.having(seq_lens=n), preset.sweeps, lengths))
    # The simulation takes 30 times as long as the time that it simulates.
    presets.PRESETS._items["gpu"] = replace(preset, sweeps=sweeps, max_time_s=0.05)


HOOKS = {"torch": simulate_gpu, "attnbench.planning.presets": shrink_preset}
