"""What a job starts from: the drafter to beat, and the one whose weights training begins with."""

import hashlib
import json
from dataclasses import asdict, dataclass

from draftkeep.distill.workbench import Workbench
from draftkeep.errors import ModelError
from draftkeep.store.models.drafter import Drafter, cold_drafter, load_drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """`served` is the channel's digest, `incumbent` the drafter the candidate must beat.

    `weights` is the drafter that training changes, `parent` its digest (None: cut from the
    target). `base` names all that a stopped job must agree on to go on from here.
    """

    served: bytes | None
    incumbent: Drafter
    weights: Drafter
    parent: bytes | None
    base: str


def choose_start(bench: Workbench) -> Start:
    """Start from what the channel serves where it fits target and configured size, else cold.

    A served drafter of another size is still the one to beat. One of another target, or that does
    not verify, counts as none.
    """
    served = bench.registry.channel(bench.scope, bench.config.serve.channel)
    incumbent = (_served(bench, served) if served is not None else None) or _cold(bench)
    same_size = incumbent.manifest.layers == bench.config.distill.layers
    parent = incumbent.digest if same_size and incumbent.digest else None
    return Start(
        served=served,
        incumbent=incumbent,
        weights=incumbent if same_size else _cold(bench),
        parent=parent,
        base=_base(bench, parent),
    )


def _served(bench: Workbench, digest: bytes) -> Drafter | None:
    try:
        drafter = load_drafter(
            bench.registry.path(digest),
            gate_public=bench.gate.public,
            expect_tokenizer=bench.target.tokenizer_fingerprint,
            expect_vocab=bench.target.vocab,
            share_embeddings=bench.target.model.get_input_embeddings().weight,
        )
    except ModelError:
        return None
    fits = drafter.manifest.target == bench.target.target_fingerprint.hex()
    return drafter if fits else None


def _cold(bench: Workbench) -> Drafter:
    distill = bench.config.distill
    return cold_drafter(
        bench.target, layers=distill.layers, vocab=distill.vocab, share_embeddings=True
    )


def _base(bench: Workbench, parent: bytes | None) -> str:
    facts = {
        "target": bench.target.target_fingerprint.hex(),
        "parent": parent.hex() if parent else None,
        "layers": bench.config.distill.layers,
        "vocab": bench.config.distill.vocab,
        "recipe": asdict(bench.recipe),
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
