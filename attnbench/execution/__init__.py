"""Sessions, runner, processes, supervision: from a plan to a run folder."""
