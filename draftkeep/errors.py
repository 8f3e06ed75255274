"""Every error draftkeep raises on purpose.

    DraftkeepError
    ├── ConfigError            a setting is missing, unknown or contradictory
    │   └── NoCatalogError     nobody has made a catalog there
    ├── InputError             a caller's request cannot be served as it stands (HTTP 400)
    ├── DeniedError            a policy said no, or could not say yes (HTTP 401)
    ├── ForbiddenError         a known caller whose key is not for this (HTTP 403)
    ├── NotFoundError          what was asked for is not here (HTTP 404)
    ├── BusyError              a bound was reached; the same call may succeed later (HTTP 429)
    ├── UnavailableError       a part that this needs is not running (HTTP 503)
    ├── FormatError            bytes that are not what their format says
    │   ├── EnvelopeError      a sealed trace that is corrupt, forged or of an unknown version
    │   └── CodecError         a trace body that does not decode
    ├── KeyDestroyedError      the key is gone; readers count this and go on
    ├── StoreError             catalog, shard or log in a state that needs an operator
    │   ├── LogFullError       the embedded log reached its byte cap
    │   ├── ConflictError      another writer won; drop the own work and start again
    │   ├── ShardError         one shard's file is not what was listed; the others can be used
    │   └── PermanentError     what repeating cannot mend
    │       └── LogReplacedError  a log is not the one that was read before
    └── ModelError             a target, tokenizer or drafter that does not fit

A message says what happened, what was got, what was expected and what to do about it. It never
holds a prompt, a token, a subject's name or a key.
"""


class DraftkeepError(Exception):
    """The root of all errors raised on purpose."""


class ConfigError(DraftkeepError):
    """A setting is missing, unknown or contradictory."""


class NoCatalogError(ConfigError):
    """Nobody has made a catalog at the configured place."""


class InputError(DraftkeepError):
    """A caller's request cannot be served as it stands. `param` names the offending field."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class DeniedError(DraftkeepError):
    """A policy said no, or could not say yes."""


class ForbiddenError(DraftkeepError):
    """An administrator's act without the administrator's key, or a key without the scope."""


class NotFoundError(DraftkeepError):
    """What was asked for is not here."""


class UnavailableError(DraftkeepError):
    """A part that this needs is not running; the same call may succeed after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class BusyError(DraftkeepError):
    """A bound was reached; the same call may succeed after `retry_after_s`."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class FormatError(DraftkeepError):
    """Bytes that are not what their format says."""


class EnvelopeError(FormatError):
    """A sealed trace that is corrupt, forged or of an unknown version."""


class CodecError(FormatError):
    """A trace body that does not decode."""


class KeyDestroyedError(DraftkeepError):
    """The key is gone, by deadline or by erasure: a normal answer that readers count and skip."""


class StoreError(DraftkeepError):
    """Catalog, shard or log in a state that needs an operator."""


class LogFullError(StoreError):
    """The embedded log reached its byte cap; nothing was written."""


class ConflictError(StoreError):
    """Another writer committed first; drop the own work and start again."""


class ShardError(StoreError):
    """One shard's file cannot be read, or is not what was listed; the others can be used."""


class PermanentError(StoreError):
    """Repeating cannot help, an operator decides: another catalog's shards, a newer schema."""


class LogReplacedError(PermanentError):
    """A log is not the one that was read before."""


class ModelError(DraftkeepError):
    """A target, tokenizer or drafter that does not fit its use."""
