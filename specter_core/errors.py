"""The two kinds of error that leave the engine."""


class UserError(ValueError):
    """Bad input. The message is one line: both values and the remedy. Command lines print it and exit with code 2."""


class WrongExpertError(RuntimeError):
    """A slot's trailer names another expert than the one that was asked for; the result would have been wrong."""
