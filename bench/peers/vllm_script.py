"""Runs inside a Python that has vLLM, started by the serving bench: reads one JSON job on standard
input, prints one JSON result as the last line.

The job: model, draft (a directory or null), draft_tokens, prompts (lists of ids), max_tokens (of
each prompt), context (the most tokens of a request), slots (the most requests at a time), together
(all at once, or one after another). The result: ids of every prompt, seconds of every call.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    """Serve the job's prompts greedily and print what came of it."""
    job: dict[str, Any] = json.load(sys.stdin)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    options: dict[str, Any] = {
        "model": job["model"],
        "dtype": "float32",
        "max_model_len": job["context"],
        "max_num_seqs": job["slots"],
        "enforce_eager": True,
        "enable_prefix_caching": False,
    }
    if job["draft"]:
        options["speculative_config"] = {
            "method": "draft_model",
            "model": job["draft"],
            "num_speculative_tokens": job["draft_tokens"],
        }
    engine = LLM(**options)
    requests = [
        ({"prompt_token_ids": ids}, SamplingParams(temperature=0.0, max_tokens=count))
        for ids, count in zip(job["prompts"], job["max_tokens"], strict=True)
    ]
    engine.generate(*requests[0], use_tqdm=False)
    groups = [requests] if job["together"] else [[request] for request in requests]
    ids: list[list[int]] = []
    seconds: list[float] = []
    for group in groups:
        prompts, sampling = map(list, zip(*group, strict=True))
        started_s = time.perf_counter()
        outputs = engine.generate(prompts, sampling, use_tqdm=False)
        seconds.append(time.perf_counter() - started_s)
        ids += [list(output.outputs[0].token_ids) for output in outputs]
    print(json.dumps({"ids": ids, "seconds": seconds}))


if __name__ == "__main__":
    main()
