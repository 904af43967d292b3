"""A dry dress rehearsal: all of `make gpu` on a CPU, before a GPU that is simulated."""
