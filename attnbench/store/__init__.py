"""Runs, gate runs and profiles on disk: made, locked, appended to, loaded, found by name."""
