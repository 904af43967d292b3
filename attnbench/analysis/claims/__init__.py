"""Claims: statements of notes, papers and READMEs, read from TOML and held against a run.

`reading` reads a file of claims, `quantities` takes what each speaks of from the run's cells, and
`ledger` turns that into findings. `notes.toml` has what five lecture notes on attention say.
"""
