"""Measures two sides in pairs: worktrees, fresh processes that take turns, rounds."""
