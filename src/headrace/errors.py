"""Every error a user of Headrace can meet, in one tree.

    HeadraceError
    ├── ConfigError(ValueError)        a setting is unknown, wrong or in conflict with another
    ├── DataError(ValueError)          a dataset, file, row or column is not what is needed
    ├── CaptureError                   a model could not be turned into a JAX program
    │   └── UnsupportedOpsError        operators without a rule, with where they are used
    ├── AdapterError(ValueError)       LoRA targets that match nothing, adapters that do not fit
    │   └── AdapterSlotsError          every slot of the engine is in use
    ├── CheckpointError                a checkpoint is missing, damaged or of another run
    ├── PlanError                      nothing can be compiled for this slice on this machine
    ├── ServeError                     the serving engine refused a request or stopped
    │   └── QueueFullError             too many requests wait; try again later
    └── TrainingError                  the run itself went wrong (loss is not finite, ...)

A message says what was given, what is needed and what to do, and lists all problems at once.
"""

from __future__ import annotations


class HeadraceError(Exception):
    """Base of all errors raised by Headrace on purpose."""


class ConfigError(HeadraceError, ValueError):
    """A setting is unknown, has a wrong value, or contradicts another one."""


class DataError(HeadraceError, ValueError):
    """A dataset, file, row or column is not what the objective needs."""


class CaptureError(HeadraceError):
    """A PyTorch module could not be turned into a JAX program."""


class UnsupportedOpsError(CaptureError):
    """The captured graph uses operators that have no JAX rule."""


class AdapterError(HeadraceError, ValueError):
    """LoRA targets match nothing, or an adapter does not fit its base model."""


class AdapterSlotsError(AdapterError):
    """Every adapter slot of the engine is in use."""


class CheckpointError(HeadraceError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class PlanError(HeadraceError):
    """A plan cannot be made here: no TPU compiler, or the compiler refused the program."""


class TrainingError(HeadraceError):
    """The training run went wrong: a loss that is not finite, a disk that is full, ..."""


class ServeError(HeadraceError):
    """The serving engine stopped, or cannot take a request."""


class QueueFullError(ServeError):
    """The engine's queue is full; the same request may succeed a little later."""
