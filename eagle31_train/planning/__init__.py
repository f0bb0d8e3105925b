"""What a run will take before anything is spent: parameters, bytes, steps, FLOPs, hours, memory."""
