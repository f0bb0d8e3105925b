"""Settings of the C library's allocator for work on large tensors on a CPU.

By default, glibc returns large freed blocks to the system and asks for them again at the next operation, and the kernel
clears every page anew. That takes a fifth to a quarter of a forward pass of a small target (docs/log.md).
"""

import ctypes

# Names and numbers of malloc.h
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
KEPT = 2**30  # bytes: freed blocks up to this size are kept, and this much free memory at the end of the heap


def keep_freed_memory() -> None:
    """Let this process reuse the memory that it frees. Without mallopt (musl, macOS), nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, size in ((M_MMAP_THRESHOLD, KEPT), (M_TRIM_THRESHOLD, KEPT), (M_TOP_PAD, 2**26)):
            mallopt(parameter, size)
