"""Adapts a drafter to the bench's own domain, once, and keeps it.

Traces are made with the engine itself, the drafter is the target's first layers and is trained by
the package's own trainer. Every part goes on where it stopped.
"""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from bench.adapt.plan import Adapted, AdaptPlan
from bench.adapt.traces import TraceFile, opened, split
from bench.engine import BenchEngine
from bench.prompts import HOME, Prompt, domain_named, draw_texts, make_prompts
from draftkeep.distill.evaluate import evaluate
from draftkeep.distill.precision import native_bfloat16
from draftkeep.distill.recipe import Recipe
from draftkeep.distill.selection import Opened
from draftkeep.distill.trainer import Trainer
from draftkeep.distill.vocabulary import choose_vocabulary
from draftkeep.files import write_file
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.to_trace import to_trace
from draftkeep.store.models.drafter import (
    Drafter,
    cold_drafter,
    save_drafter,
    with_vocab,
)
from draftkeep.store.models.drafter_export import export_full_vocab
from draftkeep.store.models.target import TargetModel, load_target

RESULT_FILE = "adapted.json"
_SECONDS_FILE = "capture.json"


class Adaptation:
    """One plan's work under `cache_dir`. `run` returns at once where it was done before."""

    def __init__(self, plan: AdaptPlan, cache_dir: Path, console: Console) -> None:
        self.plan = plan
        self.directory = cache_dir / f"adapt-{plan.key}"
        self._console = console

    def texts(self) -> list[str]:
        """Every prompt of the draw: for measuring, then held out, then for training."""
        plan = self.plan
        count = plan.measure + plan.held_out + plan.train
        return draw_texts(domain_named(HOME), count, seed=plan.seed)

    def measuring(self, target: TargetModel) -> list[Prompt]:
        """The prompts that neither trained nor judged the drafter."""
        texts = self.texts()[: self.plan.measure]
        return make_prompts(
            target, domain_named(HOME), texts, seed=0, max_tokens=self.plan.max_tokens
        )

    def run(self) -> Adapted:
        """Make the traces, train, judge, save and export."""
        path = self.directory / RESULT_FILE
        if not path.exists():
            self.directory.mkdir(parents=True, exist_ok=True)
            capture_s = self._capture()
            result = self._train(load_target(self.plan.target), capture_s)
            write_file(path, json.dumps(result, indent=1).encode())
        values = json.loads(path.read_bytes())
        return Adapted(directory=self.directory, export_dir=self.directory / "full-vocab", **values)

    def _capture(self) -> float:
        """Serve the prompts that have no trace; returns the seconds spent, earlier runs too."""
        plan = self.plan
        store, seconds = TraceFile(self.directory / "traces"), self._spent()
        wanted = range(plan.measure, plan.measure + plan.held_out + plan.train)
        had = store.indices()
        missing = [index for index in wanted if index not in had]
        if not missing:
            return seconds
        target = load_target(plan.target)
        prompts = make_prompts(
            target, domain_named(HOME), self.texts(), seed=0, max_tokens=plan.max_tokens
        )
        engine = BenchEngine(
            target,
            slots=plan.slots,
            max_context=plan.context,
            capture_k=plan.capture_k,
            speculation=Speculation(mode="off"),
        )
        with Progress(console=self._console) as progress:
            bar = progress.add_task("traces", total=len(wanted), completed=len(had))
            for at in range(0, len(missing), 4 * plan.slots):
                wave = missing[at : at + 4 * plan.slots]
                served = engine.serve([prompts[index] for index in wave])
                traces = [
                    to_trace(
                        answer,
                        context_tokens=plan.context,
                        chat_template_hash=target.chat_template_hash,
                    )
                    for answer in served.answers
                ]
                store.append(zip(wave, traces, strict=True))
                seconds += served.seconds
                write_file(self.directory / _SECONDS_FILE, json.dumps(seconds).encode())
                progress.advance(bar, len(wave))
        return seconds

    def _spent(self) -> float:
        path = self.directory / _SECONDS_FILE
        return float(json.loads(path.read_bytes())) if path.exists() else 0.0

    def _train(self, target: TargetModel, capture_s: float) -> dict[str, object]:
        plan = self.plan
        training, held_out = self._traces(target)
        drafter = cold_drafter(target, layers=plan.layers, vocab=plan.vocab, share_embeddings=True)
        cold = self._judge(drafter, held_out)
        keep = (*target.eos_ids, *target.tokenizer.all_special_ids)
        ids_D = choose_vocabulary(
            [item.trace for item in training], size=plan.vocab, keep=keep, total=target.vocab
        )
        drafter = with_vocab(drafter, target, ids_D)
        train_s, updates, acceptance = 0.0, 0, cold
        for number in range(plan.rounds):
            if acceptance >= plan.goal:
                break
            result = self._round(drafter, training, held_out, number)
            train_s, updates = train_s + result[0], updates + result[1]
            acceptance = self._judge(drafter, held_out)
            self._console.print(f"round {number + 1}: replay acceptance {acceptance:.3f}")
        digest = save_drafter(drafter, self.directory / "drafters", created_s=int(time.time()))
        if not (self.directory / "full-vocab").is_dir():
            export_full_vocab(drafter, self.directory / "full-vocab")
        return {
            "digest": digest.hex(),
            "capture_s": capture_s,
            "train_s": train_s,
            "positions": sum(item.trace.positions for item in training),
            "updates": updates,
            "acceptance": acceptance,
            "cold": cold,
            "bfloat16": native_bfloat16(),
        }

    def _round(
        self, drafter: Drafter, training: list[Opened], held_out: list[Opened], number: int
    ) -> tuple[float, int]:
        """One budget of updates; (seconds, updates)."""
        plan = self.plan
        recipe = Recipe(
            learning_rate=plan.learning_rate / (1 + number),
            batch_traces=plan.batch_traces,
            seed=plan.seed + number,
            steps=plan.steps,
            bfloat16=native_bfloat16(),
        )
        directory = self.directory / f"round-{number}"
        directory.mkdir(exist_ok=True)
        trainer = Trainer(
            drafter,
            list(training),
            recipe,
            run=f"{plan.key}-{number}",
            held_out=list(held_out),
            directory=directory,
        )
        with Progress(console=self._console) as progress:
            bar = progress.add_task("training", total=plan.steps)
            result = trainer.run(
                progress=lambda report: progress.update(bar, completed=report.step)
            )
        return result.seconds, result.steps

    def _judge(self, drafter: Drafter, held_out: list[Opened]) -> float:
        return evaluate(drafter, held_out, context=self.plan.context, lookahead=8).replay_acceptance

    def _traces(self, target: TargetModel) -> tuple[list[Opened], list[Opened]]:
        plan = self.plan
        items = opened(TraceFile(self.directory / "traces").read(), target, domain=HOME)
        held = set(range(plan.measure, plan.measure + plan.held_out))
        return split(items, held_out=held)
