"""Memory that processes share and that has no name in any folder. No torch here: the collector loads this module."""

import os
import sys
import tempfile

NAME = "unilab_fabric"
"""What Linux shows of it, as `/memfd:NAME`, in `/proc`."""


def anonymous_memory(size: int) -> int:
    """Descriptor of `size` zero bytes that other processes can map and that leave nothing behind under any kill.

    Raises OSError, naming the size, where there is not as much: later it would be a bus error.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(NAME)
    else:
        with tempfile.TemporaryFile() as file:  # its name is gone before anybody can attach
            descriptor = os.dup(file.fileno())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, f"{size} bytes of shared memory are needed: {error.strerror}") from None
    return descriptor
