"""Every command of `attnbench`, and the option of pytest: parse, call, print."""
