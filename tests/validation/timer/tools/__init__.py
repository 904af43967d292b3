"""Timing tools in processes of their own, for `attnbench selftest timer`: started, not imported."""
