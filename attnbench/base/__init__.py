"""Registry, statistics, units, lists, text: knows nothing of attention."""
