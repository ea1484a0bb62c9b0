"""A small deterministic engine that schedules as vLLM's V1 scheduler does, with rows known in advance.

It needs neither vLLM nor a model file. Its model's rows are a function of the token prefix alone, so what a stage owes
for a position can be computed without any cache, and its scheduler emits objects with vLLM's field names, so the cache
under test cannot tell it from the real thing.
"""

from conformance.engine.blocks import Block, BlockManager, FreeQueue
from conformance.engine.engine import Engine, EngineConfig, StepOutput
from conformance.engine.model import ModelConfig, PrefixModel
from conformance.engine.requests import Request, RequestStatus
from conformance.engine.runner import RunnerBatch
from conformance.engine.scheduler import CachedRequests, NewRequest, Scheduler, SchedulerOutput, SchedulerStats
from conformance.engine.workload import PlannedRequest, WorkloadConfig, make_workload

__all__ = [
    "Block",
    "BlockManager",
    "CachedRequests",
    "Engine",
    "EngineConfig",
    "FreeQueue",
    "ModelConfig",
    "NewRequest",
    "PlannedRequest",
    "PrefixModel",
    "Request",
    "RequestStatus",
    "RunnerBatch",
    "Scheduler",
    "SchedulerOutput",
    "SchedulerStats",
    "StepOutput",
    "WorkloadConfig",
    "make_workload",
]
