"""CUDA graphs for any PyTorch model: partition, dispatch, capture, replay.

``graphpass.graphed(model, ...)`` is the three-line form; ``torch.compile(model, backend="cgpass")`` with a
:class:`GraphRuntime`, a :class:`CudagraphDispatcher` and :func:`set_forward_context` are the parts it is made of.
"""

from graphpass.capture import CapturePolicy, CaptureScope, Counts, CUDAGraphWrapper, GraphRuntime, RuntimeStats
from graphpass.capture.lookup import runtime_of
from graphpass.context import (
    ForwardContext,
    get_forward_context,
    is_forward_context_available,
    set_forward_context,
)
from graphpass.dispatch import (
    AttentionSupport,
    CudagraphDispatcher,
    Dispatch,
    DispatchReason,
    LoraKeys,
    resolve_mode,
)
from graphpass.errors import (
    AgreementError,
    CaptureError,
    ContextError,
    DeviceError,
    DispatchError,
    GraphpassError,
    MismatchError,
    OptionError,
    OutOfPagesError,
    PartitionError,
    PoolBusyError,
    ShapeError,
    StaticInputError,
)
from graphpass.keys import BatchDescriptor
from graphpass.modes import CUDAGraphMode
from graphpass.partition import DEFAULT_RULES, GraphInput, Partition, Region, SplitReason, SplitRule, partition
from graphpass.tables import Report, Table

# isort: split
# Last: it drives the cgpass backend, which is made of the parts above.
from graphpass.manager import (
    AttentionMetadataBuilder,
    Batch,
    CapturedGroup,
    CapturedKey,
    CudaGraphManager,
    DataParallelAgreement,
    Generation,
    GraphedModel,
    GroupEstimate,
    InputSpec,
    KeyTraffic,
    ManagerStats,
    MemoryEstimate,
    MemoryGrowth,
    NewToken,
    PageAllocator,
    PagedAttention,
    PagedKVCache,
    PagedRequests,
    Request,
    graphed,
    zero_padding,
)

__all__ = [
    "DEFAULT_RULES",
    "AgreementError",
    "AttentionMetadataBuilder",
    "AttentionSupport",
    "Batch",
    "BatchDescriptor",
    "CUDAGraphMode",
    "CUDAGraphWrapper",
    "CaptureError",
    "CapturePolicy",
    "CaptureScope",
    "CapturedGroup",
    "CapturedKey",
    "ContextError",
    "Counts",
    "CudaGraphManager",
    "CudagraphDispatcher",
    "DataParallelAgreement",
    "DeviceError",
    "Dispatch",
    "DispatchError",
    "DispatchReason",
    "ForwardContext",
    "Generation",
    "GraphInput",
    "GraphRuntime",
    "GraphedModel",
    "GraphpassError",
    "GroupEstimate",
    "InputSpec",
    "KeyTraffic",
    "LoraKeys",
    "ManagerStats",
    "MemoryEstimate",
    "MemoryGrowth",
    "MismatchError",
    "NewToken",
    "OptionError",
    "OutOfPagesError",
    "PageAllocator",
    "PagedAttention",
    "PagedKVCache",
    "PagedRequests",
    "Partition",
    "PartitionError",
    "PoolBusyError",
    "Region",
    "Report",
    "Request",
    "RuntimeStats",
    "ShapeError",
    "SplitReason",
    "SplitRule",
    "StaticInputError",
    "Table",
    "get_forward_context",
    "graphed",
    "is_forward_context_available",
    "partition",
    "resolve_mode",
    "runtime_of",
    "set_forward_context",
    "zero_padding",
]
