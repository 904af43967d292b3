"""`make validate PART=laws`: kernels of exact exponents on a busy machine, and what is said."""
