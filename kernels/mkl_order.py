"""Products on a CPU with the same bits on every CPU, from the import of this module on.

The order in which a reference adds is part of its answer: golden tensors are met bit for bit. MKL chooses the
order by the processor unless it is told, before its first call, to be the same on all of them.
"""

import os

os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
