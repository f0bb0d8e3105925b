"""What a drafter is worth: workloads, real decoding, acceptance with intervals, drift, serving."""
