"""Errors that a person can act on. The command line prints them as one line and exits 1 or 2."""


class UserError(Exception):
    """Something outside the code is wrong: a file, a setting, a service, a disk.

    `what` says what failed and where; `remedy` says what to do about it.
    The command line prints ``error: what. remedy`` and exits with code 1.
    """

    exit_code = 1

    def __init__(self, what: str, remedy: str = ""):
        self.what = what.rstrip(".")
        self.remedy = remedy
        super().__init__(f"{self.what}. {remedy}".strip() if remedy else self.what)


class UsageError(UserError):
    """The command was typed wrongly (unknown flag, value out of range): exit code 2."""

    exit_code = 2


class CheckpointError(UserError):
    """A checkpoint folder or file is missing, damaged, foreign or does not fit the config."""
