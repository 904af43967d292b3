"""Raw rounds of two versions to verdicts and an exit code, from data alone. Starts nothing."""
