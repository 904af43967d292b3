"""Processes of two sides that take turns. Started, never imported."""
