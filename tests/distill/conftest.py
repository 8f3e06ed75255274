"""Toys for the distillation tests: a random decoder of 24 tokens, traces it served, and a whole
deployment on disk that stores them.

The traces are made by a plain loop over the target, one token at a time: no drafter, no cache.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftkeep.config import Config, DistillConfig, ModelConfig, TenantConfig
from draftkeep.distill.selection import Opened
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import Finish, How, Provenance, TopK, Trace
from draftkeep.kernels.draw import choose
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.outcome import is_end
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies import names
from draftkeep.policies.keyring import Keyring
from draftkeep.store.models.drafter import Drafter
from draftkeep.store.models.drafter_network import build_network, copy_first_layers, drafter_config
from draftkeep.store.models.manifest import Manifest
from draftkeep.store.models.target import TargetModel, load_target
from draftkeep.store.registry import Registry
from tests.clock import Clock
from tests.deployment import RETENTION, START_S, Deployment

VOCAB = 24
EOS = 2
K = 6
GREEDY = Sampling(temperature=0.0, eos_ids=(EOS,))


def toy_target(seed: int = 0, *, layers: int = 2) -> LlamaForCausalLM:
    """A random decoder, sharp enough that its tokens differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.6,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS,
        )
        config._attn_implementation = "sdpa"
        model: Any = LlamaForCausalLM(config)
        made: LlamaForCausalLM = model.eval().requires_grad_(False)
        return made


def toy_drafter(target: LlamaForCausalLM, *, layers: int, vocab_ids: Tensor) -> Drafter:
    """The target's first layers with a head over some of its ids; owns all its tensors."""
    model = build_network(
        drafter_config(target.config, layers=layers),
        embedding_VC=target.model.embed_tokens.weight.detach().clone(),
        head_DC=target.lm_head.weight.detach()[vocab_ids].clone(),
    )
    copy_first_layers(target, model)
    manifest = Manifest(target="00" * 32, tokenizer="00" * 32, layers=layers, vocab=len(vocab_ids))
    return Drafter(
        model=model,
        vocab_ids=vocab_ids,
        digest=b"",
        manifest=manifest,
        tokenizer_dir=Path("unused"),
    )


@torch.inference_mode()
def serve(
    target: LlamaForCausalLM,
    prompt: list[int],
    *,
    sampling: Sampling,
    max_tokens: int,
    seed: int = 7,
    choice: int = 0,
    noise_known: bool = True,
) -> Trace:
    """The trace of one request, served without speculation.

    With `noise_known` false it is what the rejection rule leaves: no seed, and log p of each token.
    """
    output: list[int] = []
    rows: list[Tensor] = []
    log_p: list[float] = []
    finish = Finish.LENGTH
    while len(output) < max_tokens:
        logits_V = target(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        scores_V = process(logits_V.numpy(), sampling, prompt_ids=prompt, output_ids=output)
        noise_V = None if sampling.greedy else gumbel(seed, choice, len(output), VOCAB)
        output.append(choose(scores_V, noise_V))
        rows.append(logits_V)
        log_p.append(0.0 if sampling.greedy else float(log_softmax64(scores_V)[output[-1]]))
        if is_end(output[-1], sampling):
            finish = Finish.STOP
            break
    made = make_trace(prompt, output, torch.stack(rows), sampling=sampling, finish=finish)
    made = replace(made, seed=seed, choice=choice)
    if noise_known:
        return made
    return replace(made, seed=None, processed_logprob_T=np.array(log_p, np.float32))


def make_trace(
    prompt: list[int],
    output: list[int],
    logits_TV: Tensor,
    *,
    sampling: Sampling,
    seed: int | None = 7,
    choice: int = 0,
    finish: Finish = Finish.LENGTH,
    k: int = K,
) -> Trace:
    """A trace with the top k of these logits at each position and the exact tail."""
    logp_TV = logits_TV.double().log_softmax(dim=1)
    ordered = torch.sort(logp_TV, dim=1, descending=True, stable=True)
    count = len(output)
    tail_T = torch.logsumexp(ordered.values[:, k:], dim=1)
    return Trace(
        prompt_ids_P=np.array(prompt, np.int32),
        output_ids_T=np.array(output, np.int32),
        topk=TopK(
            ids_TK=ordered.indices[:, :k].numpy().astype(np.int32),
            logprobs_TK=ordered.values[:, :k].numpy().astype(np.float32),
            k_T=np.full(count, min(k, logits_TV.shape[1]), np.uint8),
            tail_T=tail_T.numpy().astype(np.float32),
            tail_known_T=np.ones(count, np.bool_),
        ),
        how_T=np.full(count, How.PLAIN, np.uint8),
        rejected_T=np.full(count, -1, np.int32),
        sampling=sampling,
        seed=seed,
        choice=choice,
        finish=finish,
    )


def opened(trace: Trace, number: int, *, domain: str | None = "sql", origin: int = 0) -> Opened:
    """The trace under a header of its own; `number` makes ids."""
    name = number.to_bytes(16, "big")
    header = Header(
        version=1,
        trace_id=name,
        request_id=name,
        tenant="acme",
        period_id=bytes(16),
        alias=name,
        subject_kind=1,
        share_id=bytes(16),
        target=bytes(32),
        tokenizer=bytes(32),
        node="node-1",
        created_s=100,
        expiry_s=1000,
        consent=0,
        policy_version=1,
        origin=origin,
        parent_trace_id=None,
        domain=domain,
        prompt_tokens=len(trace.prompt_ids_P),
        positions=trace.positions,
        body_bytes=0,
        ext=b"",
    )
    return Opened(header=header, trace=trace)


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    """One toy target, never changed."""
    return toy_target()


@pytest.fixture(scope="session")
def corpus(target: LlamaForCausalLM) -> list[Opened]:
    """24 short traces, a third of them sampled."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(24):
        prompt = rng.integers(3, VOCAB, size=int(rng.integers(2, 7))).tolist()
        sampling = Sampling(temperature=0.8, eos_ids=(EOS,)) if number % 3 == 0 else GREEDY
        trace = serve(target, prompt, sampling=sampling, max_tokens=8, seed=number)
        found.append(opened(trace, number))
    return found


@dataclass(kw_only=True)
class Workshop(Deployment):
    """A state directory with everything a job needs, filled with real sealed traces."""

    config: Config
    target: TargetModel
    served: dict[bytes, str] = field(default_factory=dict)

    @property
    def registry(self) -> Registry:
        return Registry(self.catalog, self.config.state_dir / "drafters")

    def seal(self, trace: Trace, subject: str, number: int, **changes: Any) -> SealedTrace:
        """Seal a trace of `subject`, its held-out bit set as the emitter sets it."""
        values: dict[str, Any] = {
            "tenant": "acme",
            "subject": subject,
            "response_id": number.to_bytes(16, "big"),
            "domain": "sql",
            "consent": 0,
            "policy_version": 1,
            "created_s": int(self.clock()),
            "target": self.target.target_fingerprint,
            "tokenizer": self.target.tokenizer_fingerprint,
        }
        body = changes.pop("body", None)
        provenance = Provenance(**(values | changes))
        held_out = self.sealer.held_out(provenance)
        body = body or encode_body(replace(trace, held_out=held_out), RemapTable.identity())
        sealed = self.seal_as(
            provenance, body, prompt_tokens=len(trace.prompt_ids_P), positions=trace.positions
        )
        self.served[sealed.parsed.trace_id] = subject
        return sealed

    def store(self, *sealed: SealedTrace) -> None:
        """Log and compact, as the running parts do."""
        self.append(*sealed)
        report = self.compactor().run_once()
        assert report.stored == len(sealed)

    def fill(self, traces: list[Trace], *, subjects: int) -> None:
        """Store all of `traces`, spread over so many named subjects."""
        self.store(
            *(
                self.seal(trace, f"user-{number % subjects:03d}", number)
                for number, trace in enumerate(traces)
            )
        )


def save_target(target: LlamaForCausalLM, directory: Path) -> Path:
    """The toy target as a model directory with a tokenizer of one word a token."""
    words = {f"t{number}": number for number in range(VOCAB)}
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = wrap(tokenizer_object=Tokenizer(models.WordLevel(words)), eos_token=f"t{EOS}")
    target.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def traffic(target: LlamaForCausalLM) -> list[Trace]:
    """160 traces of a few alternating prompts, so that there is something to learn."""
    rng = np.random.default_rng(11)
    return [
        serve(
            target,
            [*rng.integers(3, 7, size=3).tolist(), 3 + number % 5],
            sampling=GREEDY if number % 4 else Sampling(temperature=0.5, eos_ids=(EOS,)),
            max_tokens=10,
            seed=number,
        )
        for number in range(160)
    ]


@pytest.fixture(scope="session")
def target_dir(target: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy target on disk."""
    return save_target(target, tmp_path_factory.mktemp("target"))


def _keys_that_hold_some_out(root: Path, clock: Clock) -> Path:
    """A keys directory whose random key holds out enough of `user-000` to `user-079` to judge."""
    while True:
        directory = root / f"keys-{random.randrange(10**9)}"
        keyring = Keyring.open(directory, retention=RETENTION, clock=clock)
        key = keyring.lookup_key("acme")
        keyring.close()
        if 6 <= sum(names.held_out(key, f"user-{n:03d}", b"") for n in range(80)) <= 12:
            return directory


@contextmanager
def deploy(root: Path, target_dir: Path) -> Iterator[Workshop]:
    """An empty deployment of one tenant, acme."""
    clock = Clock(START_S + 60.0)
    config = Config(
        state_dir=root,
        keys_dir=_keys_that_hold_some_out(root, clock),
        model=ModelConfig(target=str(target_dir)),
        retention=RETENTION,
        distill=DistillConfig(
            layers=1, vocab=20, seconds=50, batch_traces=8, learning_rate=1e-2, min_traces=16
        ),
        tenants=(TenantConfig(name="acme", api_key_sha256="0" * 64),),
    )
    made = Workshop.open(
        root,
        clock=clock,
        tenants=("acme", "birch"),
        keys_dir=config.keys_path,
        config=config,
        target=load_target(str(target_dir)),
    )
    yield made
    made.close()


@pytest.fixture(scope="session")
def model_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the models' cache out of the user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTKEEP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def deployment(target_dir: Path, tmp_path: Path, model_cache: None) -> Iterator[Workshop]:
    """An empty deployment of one tenant, acme."""
    with deploy(tmp_path, target_dir) as made:
        yield made


@pytest.fixture
def filled(deployment: Workshop, traffic: list[Trace]) -> Workshop:
    """Traces of 80 people, some of whom are held out."""
    deployment.fill(traffic, subjects=80)
    return deployment
