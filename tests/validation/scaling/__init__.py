"""`attnbench selftest scaling`: kernels of known law, and whether they are judged rightly."""
