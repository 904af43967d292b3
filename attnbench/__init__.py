"""attnbench: benchmark and profile attention implementations."""
