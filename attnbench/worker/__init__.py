"""One group of cells in one process: build, check, measure, emit. Started, never imported."""
