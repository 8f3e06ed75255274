"""Drafter directories, fingerprints and replay, as the second reader finds them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftkeep.distill.evaluate import walk_of
from draftkeep.distill.replay import replay
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.tables import RemapTable
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.signing import SigningKey
from draftkeep.store.models.drafter import save_drafter
from draftkeep.store.models.drafter_files import sign_drafter
from draftkeep.store.models.fingerprint import fingerprints, tokenizer_fingerprint
from draftkeep.store.models.manifest import Manifest
from tests.distill.conftest import EOS, VOCAB, serve, toy_drafter, toy_target
from tests.formats import reader_draws, reader_files
from tests.formats.reader_body import decode_body
from tests.formats.reader_cbor import FormatError

GATE = SigningKey(b"g" * 32)
TOKENIZER: dict[str, Any] = {
    "model": {"vocab": {"é": 1, "a": 0, "\U0001f600": 3, "\x7f": 2}, "merges": ["a é", ["a", "a"]]},
    "added_tokens": [{"id": 9, "content": "<b>", "lstrip": False}, {"id": 4, "content": "<a>"}],
    "normalizer": None,
    "pre_tokenizer": {"type": "Split", "share": 1e-5, "large": 1e16, "one": 1.0},
    "decoder": {"type": "does not count"},
}
# The canonical JSON of the above, written out by hand.
CANONICAL = (
    rb'{"added_tokens":[{"content":"<a>","id":4},{"content":"<b>","id":9,"lstrip":false}],'
    rb'"merges":[["a","\u00e9"],["a","a"]],"normalizer":null,'
    rb'"pre_tokenizer":{"large":1e+16,"one":1.0,"share":1e-05,"type":"Split"},'
    rb'"vocab":{"a":0,"\u007f":2,"\u00e9":1,"\ud83d\ude00":3}}'
)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy target with a tokenizer.json that needs every rule of canonical JSON."""
    directory = tmp_path_factory.mktemp("target")
    toy_target().save_pretrained(directory)
    (directory / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    return directory


def test_fingerprints_agree(target_dir: Path, tmp_path: Path) -> None:
    found = fingerprints(target_dir, cache_dir=tmp_path)
    tokenizer = reader_files.tokenizer_fingerprint((target_dir / "tokenizer.json").read_bytes())
    config = (target_dir / "config.json").read_bytes()
    tensors = reader_files.read_safetensors((target_dir / "model.safetensors").read_bytes())
    assert tokenizer == found.tokenizer
    assert reader_files.target_fingerprint(config, tensors, tokenizer) == found.target


def test_canonical_json_by_hand() -> None:
    said = reader_files.tokenizer_facts(json.dumps(TOKENIZER).encode())
    assert reader_files.canonical(said) == CANONICAL


def test_a_drafter_directory_is_verified(target_dir: Path, tmp_path: Path) -> None:
    ids = torch.tensor([0, EOS, 5, 7, 20])
    drafter = toy_drafter(toy_target(), layers=1, vocab_ids=ids)
    tokenizer = tokenizer_fingerprint((target_dir / "tokenizer.json").read_bytes())
    manifest = Manifest(target="ab" * 32, tokenizer=tokenizer.hex(), layers=1, vocab=5)
    drafter = replace(drafter, manifest=manifest, tokenizer_dir=target_dir)
    measures = {"replay": 0.5, "tokens_per_step": float("nan")}
    digest = save_drafter(drafter, tmp_path, created_s=5, lineage={"traces": 3}, measures=measures)
    directory = tmp_path / digest.hex()
    sign_drafter(directory, GATE.sign)
    found = reader_files.read_drafter(directory, GATE.public)
    assert (found.digest, found.vocab_ids.tolist()) == (digest, ids.tolist())
    assert found.manifest["lineage"] == {"traces": 3}
    with pytest.raises(FormatError, match="signature is wrong"):
        reader_files.read_drafter(directory, SigningKey(b"x" * 32).public)
    (directory / "config.json").write_bytes(b"{}")
    with pytest.raises(FormatError, match="digest is another"):
        reader_files.read_drafter(directory, GATE.public)


@torch.inference_mode()
def drafter_rows(model: Any, ids: list[int], tokens: list[int], start: int) -> list[Any]:
    """The drafter's logits over the target's vocabulary at each output position, one by one."""
    rows: list[NDArray[np.float32] | None] = []
    for end in range(start, len(tokens)):
        logits_V = np.full(VOCAB, -np.inf, np.float32)
        logits_V[ids] = model(torch.tensor([tokens[:end]])).logits[0, -1].float().numpy()
        rows.append(logits_V)
    return rows


@pytest.mark.parametrize("noise_known", [True, False])
@pytest.mark.parametrize(
    ("sampling", "vocab_ids"),
    [
        (Sampling(temperature=0.0, eos_ids=(EOS,)), range(VOCAB)),
        (Sampling(temperature=0.0, eos_ids=(EOS,), min_tokens=9, repetition_penalty=1.2), (2, 5)),
        (Sampling(temperature=0.8, top_p=0.9, eos_ids=(EOS,), frequency_penalty=0.3), range(16)),
        (Sampling(temperature=1.3, top_k=9, logit_bias=((3, 2.0),), ignore_eos=True), range(VOCAB)),
        # Everything the drafter knows is barred at first: untested, and a rejection to the walk.
        (Sampling(temperature=0.8, eos_ids=(EOS,), min_tokens=4), (EOS,)),
    ],
)
def test_replay_agrees(sampling: Sampling, vocab_ids: Any, noise_known: bool) -> None:
    target, ids = toy_target(), list(vocab_ids)
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.tensor(ids))
    trace = serve(
        target,
        [1, 9, 4],
        sampling=sampling,
        max_tokens=24,
        seed=2**63 + 5,
        choice=2,
        noise_known=noise_known,
    )
    body = decode_body(encode_body(trace, RemapTable.identity()))
    logged = reader_draws.Logged(
        body.prompt.tolist(),
        body.output.tolist(),
        body.settings,
        body.seed,
        body.choice,
        body.processed_logp,
    )
    tokens = [*logged.prompt, *logged.output]
    rows = drafter_rows(drafter.model, ids, tokens, len(logged.prompt))
    mine = reader_draws.replay(logged, rows)
    (theirs,) = replay(drafter, [trace], context=64)
    # This trace's log p is still off the grid of the body.
    assert [max(a, 0) for a in mine] == pytest.approx(theirs.accept_T.tolist(), rel=3e-4)
    assert [a != reader_draws.UNTESTED for a in mine] == theirs.proposed_T.tolist()
    if theirs.proposed_T.any():
        assert reader_draws.replay_acceptance(mine) == pytest.approx(theirs.acceptance, rel=3e-4)
    budget = len(mine) if body.finish == 1 and not body.output_cut else None
    for lookahead in (0, 1, 4):
        walked = walk_of(trace, theirs, lookahead)
        expected = (walked.accepted, walked.tested)
        assert reader_draws.walk(mine, lookahead, budget) == pytest.approx(expected, rel=1e-3)
