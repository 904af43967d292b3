"""Starts workers: imports torch once, then forks a process for each that is asked for.

Usage: python -m attnbench.worker DESCRIPTORS, as `forking.become` takes them.
"""

import gc

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage: a fifth of the time of importing torch
    from attnbench.worker.forking import become
    from attnbench.worker.serving import main

    become(main)
