"""Claims: statements of notes, papers and READMEs, read from TOML and held against a run.

`statement` reads a file of claims, `judging` finds what each speaks of in the run's cells and turns
it into a finding. `notes.toml` has what four lecture notes on attention say and a run can decide.
"""
