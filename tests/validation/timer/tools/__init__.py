"""Timing tools in processes of their own, for `make validate PART=timer`: started, not imported."""
