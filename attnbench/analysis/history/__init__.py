"""Runs over time: what is kept of each, and where their times changed for good."""
