"""Finding: what one check of `draftkeep doctor` came to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The outcome of one check. `remedy` is empty where nothing has to be done."""

    check: str
    status: str
    detail: str
    remedy: str = ""
