"""Versions to compare: commits of a repository, and environments with a torch of their own."""
