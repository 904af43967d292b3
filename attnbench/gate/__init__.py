"""Is one version of the code slower than another? Rounds in `run`, verdicts in `decide`."""
