"""Starts the processes of a round: imports torch once, then forks one for each variant.

Usage: python -m attnbench.gate.server DESCRIPTORS, as `forking.become` takes them. All processes
of a round share the address layout of this one, which is drawn anew for each round; the memory they
compute in is their own.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage: a fifth of the time of importing torch
    from attnbench.gate.server.variant import main
    from attnbench.worker.forking import become

    become(main)
