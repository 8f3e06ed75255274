"""House: one served node that answers every question twice, with a drafter and without."""

import copy
from typing import Any

import torch

from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.stats import EngineStats
from tests.serve.station import Station

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = "How many rows has the table orders?"
LOOKAHEAD = 5


def copy_of(model: Any) -> DraftModel:
    """A drafter that is the target itself: every draft is accepted."""
    return DraftModel(
        model=copy.deepcopy(model),
        vocab_ids=torch.arange(model.config.vocab_size),
        digest=b"copy".ljust(32, b"."),
    )


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    """A request of that route; `text` is the question, the rest are its fields."""
    text = fields.pop("text", QUESTION)
    asked: dict[str, Any] = {"model": "tiny", "seed": 5, "max_tokens": 12}
    if path == CHAT:
        asked["messages"] = [{"role": "user", "content": text}]
    else:
        asked["prompt"] = text
    return asked | fields


def text_of(choice: dict[str, Any]) -> str:
    """The text of a whole answer's choice."""
    return str(choice["message"]["content"] if "message" in choice else choice["text"])


def piece_of(choice: dict[str, Any]) -> str:
    """The text that one event adds."""
    if "delta" in choice:
        return str(choice["delta"].get("content") or "")
    return str(choice["text"])


class House:
    """A station whose drafter is a copy of its target; `plain` is that model, unserved."""

    def __init__(self, station: Station, plain: Any) -> None:
        self.station = station
        self.plain = plain
        self.engine = station.node.engine
        self.tokenizer: Any = station.node.target.tokenizer
        self.restore()

    def restore(self) -> None:
        """Draft with the copy."""
        self.engine.swap(copy_of(self.plain))

    def idle(self) -> EngineStats:
        """The counters once nothing runs: a last token is delivered before it is counted, and its
        step is reported after that."""
        metrics = self.station.node.metrics

        def reported() -> bool:
            tokens = metrics.counted().total.tokens
            stats = self.engine.stats()
            return stats.known == 0 and stats.output_tokens == tokens

        self.station.wait_for(reported)
        return self.engine.stats()

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """What full passes of the plain model write, an EOS like any other token."""
        ids = list(prompt)
        with torch.inference_mode():
            for _ in range(tokens):
                ids.append(int(self.plain(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
        return ids[len(prompt) :]

    def speculate(self, lookahead: int) -> None:
        """Draft that many tokens a step from here on; 0 switches drafting off."""
        body = {"mode": "fixed", "lookahead": lookahead} if lookahead else {"mode": "off"}
        assert self.station.admin("POST", "/admin/speculation", body).status_code == 200

    def ask(self, path: str = CHAT, *, tenant: str = "acme", **fields: Any) -> dict[str, Any]:
        """A whole answer that must succeed."""
        response = self.station.post(path, body_for(path, **fields), tenant=tenant)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """The events of a stream that must succeed, without [DONE]."""
        return self.station.stream(path, body_for(path, stream=True, **fields))

    def both(self, path: str = CHAT, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same question without drafts and with blocks of several tokens."""
        self.speculate(0)
        plain = self.ask(path, **fields)
        self.speculate(LOOKAHEAD)
        before = self.idle().accepted
        drafted = self.ask(path, **fields)
        if drafted["usage"]["completion_tokens"] > 2 * drafted["choices"][-1]["index"] + 2:
            assert self.idle().accepted > before
        return plain, drafted

    def answers(self, path: str = CHAT, **fields: Any) -> list[dict[str, Any]]:
        """The choices of a question, asserted to be the same with drafts as without.

        Log-probabilities are those with drafts; what a pass gives depends in its last bits on its
        width, so whoever asks for them compares them.
        """
        plain, drafted = self.both(path, **fields)
        for one, other in zip(plain["choices"], drafted["choices"], strict=True):
            assert one | {"logprobs": None} == other | {"logprobs": None}
        assert drafted["usage"] == plain["usage"]
        choices: list[dict[str, Any]] = drafted["choices"]
        return choices
