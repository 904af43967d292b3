"""Clock, stopping rule, memory, counted FLOPs and kernels of any callable; knows no attention."""
