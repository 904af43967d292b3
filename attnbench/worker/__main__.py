"""Starts workers: imports torch once, then forks a process for each that is asked for.

Usage: python -m attnbench.worker DESCRIPTORS, a list of numbers as JSON. They are those of a worker
(see `serving.main`), which this process becomes; or a single one, the socket on which the runner
asks for workers.
"""

import gc
import json
import sys

if __name__ == "__main__":
    gc.disable()  # imports leave no garbage: a fifth of the time of importing torch
    from attnbench.worker.forking import next_fork
    from attnbench.worker.serving import main

    descriptors = json.loads(sys.argv[1])
    gc.freeze()  # what was imported stays: a collection would copy it into each process
    gc.enable()
    main(*(descriptors if len(descriptors) > 1 else next_fork(*descriptors)))
