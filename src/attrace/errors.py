"""The errors that attrace raises on purpose, one tree:

    AttraceError
    ├── InputError            what was given to a call: text, position, option
    │   ├── TextTooLongError  more tokens than the model's context
    │   └── TargetError       a target that the model does not have
    ├── ShapeError            arrays whose shapes do not fit (also a ValueError)
    ├── NonFiniteError        NaN or infinity where a number is needed (also a ValueError)
    ├── ModelError            a model that cannot be read
    │   ├── UnsafeWeightsError  weights in pickle form
    │   └── CaptureError      no attention seen, or attention that cannot be read
    ├── MemoryLimitError      a map too large for the memory at hand (also a MemoryError)
    ├── OutputError           a file that cannot be written
    └── MissingDependencyError  an optional package is not installed (also an ImportError)

Every message says what was expected, what came, and what to do.  What can be read, but not as a whole, is an
AttraceWarning, a UserWarning of its own.
"""

from __future__ import annotations


class AttraceError(Exception):
    """Base of all errors that attrace raises on purpose."""


class InputError(AttraceError, ValueError):
    """An argument that cannot be used: an empty text, a position out of range, an unknown method."""


class TextTooLongError(InputError):
    """The text has more tokens than the model's context holds."""


class TargetError(InputError):
    """The target does not exist in this model."""


class ShapeError(AttraceError, ValueError):
    """Arrays whose shapes do not fit each other or the operation."""


class NonFiniteError(AttraceError, ValueError):
    """NaN or infinity where a finite number is needed."""


class ModelError(AttraceError):
    """A model that cannot be read or used."""


class UnsafeWeightsError(ModelError):
    """Weights in pickle form; attrace reads safetensors only."""


class CaptureError(ModelError):
    """No attention was seen, or what was seen cannot be read as attention."""


class MemoryLimitError(AttraceError, MemoryError):
    """A result asked for as a whole would not fit in the memory at hand; it can be had in parts."""


class OutputError(AttraceError):
    """A result that cannot be written where it was asked for."""


class MissingDependencyError(AttraceError, ImportError):
    """An optional package is missing; the message names the extra that brings it."""


class AttraceWarning(UserWarning):
    """A trace that can be read, with something to know of it: layers without attention, dropout that was on."""
