"""The toy target `tiny`: a seeded Llama and its tokenizer, built from code in a few seconds.

For demos and tests that must run anywhere without a download. It answers in the manner of its
templates, ends most answers, and its deeper layers are worth imitating, so a drafter cut from it
has something to learn.

Shapes: B rows, T positions.
"""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftkeep.files import new_directory
from draftkeep.store.models.tiny_text import dialogues

_SEED = 7
_VOCAB = 512
_DIALOGUES = 2000
_STEPS = 140
_ROWS = 16
_PEAK_RATE = 6e-3
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_IGNORED = -100
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tiny(cache_dir: Path) -> Path:
    """The toy's directory under `cache_dir`, built on the first call (seconds, one thread).

    The same machine and library versions build the same bytes; other machines may round
    differently and so get another fingerprint. A crash leaves nothing half-made.
    """
    final = cache_dir / "tiny"
    if not final.is_dir():
        tokenizer = _tokenizer()
        model = _grown(tokenizer)
        with new_directory(final) as building:
            model.save_pretrained(building)
            tokenizer.save_pretrained(building)
    return final


def _tokenizer() -> Any:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB,
        special_tokens=list(_SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(("\n".join(row) for row in dialogues(_DIALOGUES, seed=_SEED)), trainer)
    maker: Any = PreTrainedTokenizerFast
    tokenizer = maker(
        tokenizer_object=core,
        bos_token=_SPECIAL[1],
        eos_token=_SPECIAL[2],
        pad_token=_SPECIAL[0],
    )
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _grown(tokenizer: Any) -> Any:
    threads = torch.get_num_threads()
    # One thread and a private generator: sums are added in one order, whoever else draws numbers.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            model: Any = LlamaForCausalLM(_config())
            _train(model, _rows(tokenizer))
    finally:
        torch.set_num_threads(threads)
    return model.eval()


def _config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.05,
    )


def _rows(tokenizer: Any) -> list[list[int]]:
    rows = []
    for system, question, answer in dialogues(_DIALOGUES, seed=_SEED):
        text = tokenizer.apply_chat_template(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            tokenize=False,
        ).removesuffix("\n")
        rows.append(list(tokenizer(text, add_special_tokens=False)["input_ids"]))
    return rows


def _train(model: Any, rows: list[list[int]]) -> None:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=_PEAK_RATE, total_steps=_STEPS, pct_start=0.1
    )
    model.train()
    for step in range(_STEPS):
        start = step * _ROWS % (len(rows) - _ROWS)
        # Rows of like length together would bias a step, padding costs less than that.
        ids_BT = _padded(rows[start : start + _ROWS])
        loss = model(input_ids=ids_BT, labels=ids_BT.masked_fill(ids_BT == 0, _IGNORED)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    # Padding stands at the end, where no real position attends to it.
    return torch.tensor([row + [0] * (width - len(row)) for row in rows])
