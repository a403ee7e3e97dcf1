"""The errors that have no built-in of their own.

Everything else is raised as the built-in that fits: IndexError (outside a table), OverflowError (a value that does
not fit its dtype), TypeError (the wrong kind of value), ValueError (shapes, sizes, devices).
"""


class UvaUnavailableError(RuntimeError):
    """Pinned host memory cannot be read or written in place by this device; `uva_status()` says why."""


class CaptureError(RuntimeError):
    """The stream is being captured into a graph, and the call would bake a slot into it.

    Nothing was launched, recorded or queried: the capture can go on. Stage inside a capture if you like, and apply
    before it begins or after it ends.
    """
