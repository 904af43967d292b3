"""The processes of a round, which are timed interleaved. Started, never imported."""
