"""The prompts of the benches that serve: the demo's domains, and one that no drafter here has seen.

Prompts of one draw are distinct. What is measured on and what is trained on are slices of one draw,
so that nothing is measured on a prompt that was trained on.
"""

import random
from dataclasses import dataclass

from draftkeep.cli.demo.workload import DOMAINS, PEOPLE, Domain
from draftkeep.errors import InputError
from draftkeep.kernels.sampling import Sampling
from draftkeep.store.models.target import TargetModel

# The domain the bench's drafter is adapted on.
HOME = "sql"
_TRIES = 200


def _letter(rng: random.Random) -> str:
    who, friend = rng.sample(PEOPLE, 2)
    place = rng.choice(("Lisbon", "the mountains", "a small farm", "the seaside", "the old town"))
    mood = rng.choice(("cheerful", "worried", "grateful", "tired", "curious", "proud"))
    shapes = (
        f"{who} writes a {mood} letter to {friend} about a week in {place}. Begin the letter.",
        f"Describe what {who}, who feels {mood}, sees on a morning walk near {place}.",
        f"Tell how {who} and {friend} met by chance in {place}.",
    )
    return rng.choice(shapes)


UNSEEN = Domain(
    name="letters",
    system="You are a storyteller.",
    make=_letter,
    temperature=0.7,
    max_tokens=64,
    subjects=1,
    share=0.0,
)
ALL_DOMAINS: tuple[Domain, ...] = (*DOMAINS, UNSEEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One request of the bench: token ids of the whole chat, and how to sample."""

    domain: str
    ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    max_tokens: int


def domain_named(name: str) -> Domain:
    """The domain of that name; InputError where there is none."""
    for domain in ALL_DOMAINS:
        if domain.name == name:
            return domain
    names = ", ".join(domain.name for domain in ALL_DOMAINS)
    raise InputError(f"no domain of the bench is called {name!r}; choose one of {names}")


def draw_texts(domain: Domain, count: int, *, seed: int) -> list[str]:
    """`count` distinct prompts of a domain, a function of the arguments.

    Raises InputError where the templates do not have that many.
    """
    rng = random.Random(seed)
    found: dict[str, None] = {}
    for _ in range(_TRIES * count):
        if len(found) == count:
            break
        found[domain.make(rng)] = None
    if len(found) < count:
        raise InputError(
            f"the domain {domain.name} gave {len(found)} distinct prompts of {count}; ask for fewer"
        )
    return list(found)


def make_prompts(
    target: TargetModel,
    domain: Domain,
    texts: list[str],
    *,
    seed: int,
    max_tokens: int | None = None,
) -> list[Prompt]:
    """Chat prompts of these texts in the target's own template.

    `max_tokens` None is the domain's. Seeds count up from `seed`.
    """
    sampling = Sampling(temperature=domain.temperature, eos_ids=target.eos_ids)
    return [
        Prompt(
            domain=domain.name,
            ids=_ids(target, domain.system, text),
            sampling=sampling,
            seed=seed + index,
            max_tokens=max_tokens or domain.max_tokens,
        )
        for index, text in enumerate(texts)
    ]


def _ids(target: TargetModel, system: str, text: str) -> tuple[int, ...]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
    chat = target.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tuple(target.tokenizer(chat, add_special_tokens=False)["input_ids"])
