"""Measures two versions in pairs: worktrees, checks, interleaved rounds of fresh processes."""
