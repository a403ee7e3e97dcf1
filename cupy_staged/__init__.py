"""Staged writes for CuPy programs: change a few cells of large device tables for the price of one small launch."""

from .block_tables import BlockTables
from .buffers import UvaBackedTensor, UvaBuffer, UvaBufferPool
from .device import UvaStatus, is_uva_available, uva_status
from .errors import CaptureError, UvaUnavailableError
from .kernels import warmup
from .params import DeviceParamTable
from .ranges import named_ranges
from .ring import Stats, set_default_max_concurrency
from .staged import FusedStagedWriter, StagedWriteTensor

__version__ = "0.1.0"

__all__ = [
    "BlockTables",
    "CaptureError",
    "DeviceParamTable",
    "FusedStagedWriter",
    "StagedWriteTensor",
    "Stats",
    "UvaBackedTensor",
    "UvaBuffer",
    "UvaBufferPool",
    "UvaStatus",
    "UvaUnavailableError",
    "is_uva_available",
    "named_ranges",
    "set_default_max_concurrency",
    "uva_status",
    "warmup",
]
