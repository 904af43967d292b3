"""What this machine is: its facts, counters, allocator and limits."""
