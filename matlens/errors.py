"""The one exception that a user's input can cause."""


class InputError(ValueError):
    """Something the user gave cannot be used.

    The message says what was wrong, what was expected and what to do. The command line
    prints it without a traceback and exits with code 2; everything else is a defect of ours.
    """
