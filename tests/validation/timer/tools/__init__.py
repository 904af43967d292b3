"""Timing tools in processes of their own, for `make validate PART=tools`: started, not imported."""
