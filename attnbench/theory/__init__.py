"""Laws, FLOPs, bytes, pairs of a mask, workload traits: from sizes alone."""
