"""Claims: statements of notes, papers and READMEs, read from TOML and held against a run.

`quantities` takes what a claim speaks of from the run's cells, and `judging` reads a file of claims
and turns each into a finding. `notes.toml` has what five lecture notes on attention say.
"""
