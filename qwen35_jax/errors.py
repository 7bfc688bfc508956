"""The exceptions a user can cause. Each message names what is wrong and what to do about it."""


class ConfigError(ValueError):
    """A config.json field, an engine option or their combination that this engine can't run."""


class CheckpointError(Exception):
    """A checkpoint directory, file or tensor that can't be loaded."""


class TokenizerError(Exception):
    """A tokenizer or chat template file that is missing or can't be used."""


class InvalidRequestError(ValueError):
    """A request that can't be served as asked.

    `param` is the request field at fault; `code` a stable word for programs, such as
    `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


# What a command prints as one line, with exit code 2, instead of a traceback.
USER_ERRORS = (ConfigError, CheckpointError, TokenizerError, InvalidRequestError)
