"""The processes of a round, which take turns. Started, never imported."""
