"""How glibc's malloc deals with large tensors on a CPU."""

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # mallopt's parameter numbers, from glibc's malloc.h


def keep_freed_memory() -> None:
    """Tell glibc's malloc to keep freed memory: activations of tens of megabytes would go back to the kernel and be
    faulted in again, page by page, in each training step, which can take as long as the computation."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # musl, macOS and Windows have no mallopt
        print("note: this C library has no mallopt; large minibatches will be slower on the CPU.", file=sys.stderr)
        return
    for parameter, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 256 * 2**20)):
        mallopt(parameter, value)
