"""The exception by which a run stops itself."""


class RunStopped(RuntimeError):
    """The run cannot go on. The message is the reason, shown last; the exit code is 3."""
