"""How cost grows: series from a run, exponents, models of several terms, verdicts."""
