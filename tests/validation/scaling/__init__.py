"""`make validate PART=scaling`: kernels of known law, and whether they are judged rightly."""
