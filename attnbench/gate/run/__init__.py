"""Measures two versions in pairs: checkouts, checks, interleaved rounds of fresh processes."""
