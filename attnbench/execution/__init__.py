"""Sessions, runner, processes, supervision, store: from a plan to a run folder."""
