"""The built-in implementations: one, or one close family, a file. Installed as attnbench_impls."""
