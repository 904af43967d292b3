"""`python -m tests.mute DESCRIPTORS` in place of a server of workers: it answers late, or never.

It forks as the true one does; to all else it answers ATTNBENCH_MUTE_S seconds after it was asked.
"""

import json
import os
import socket
import subprocess
import sys
import time

control, *_ = json.loads(sys.argv[1])
with socket.socket(fileno=control) as line:
    while request := socket.recv_fds(line, 1 << 10, 8)[0]:
        what, *_ = json.loads(request)
        if what == os.environ.get("ATTNBENCH_MUTE_ANSWERS"):
            child = subprocess.Popen(["sleep", "600"])  # with the mark of this one
            line.send(json.dumps(child.pid).encode())
            continue
        time.sleep(float(os.environ["ATTNBENCH_MUTE_S"]))
        line.send(b"7")
