"""How often the gate is wrong: live runs of it on known sides, resampled ones, other tools."""
