"""The gate's decisions: raw rounds of two sides to verdicts with an exit code. Starts nothing."""
