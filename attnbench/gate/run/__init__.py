"""Measures two versions in pairs: worktrees, checks, rounds of fresh processes that take turns."""
