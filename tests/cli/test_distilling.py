"""What is said of a job that ended."""

import io

import pytest
from rich.console import Console

from draftkeep.cli.distilling import print_outcome
from draftkeep.config import Config
from draftkeep.distill.result import JobResult, JobStatus
from draftkeep.policies.gate import PairedScore, decide


@pytest.mark.parametrize("requests", [0, 5])
def test_a_refusal_for_too_few_requests_says_how_many_there_were(requests: int) -> None:
    scores = [
        PairedScore(request=bytes([number]), domain="sql", candidate=0.5, incumbent=0.1)
        for number in range(requests)
    ]
    gate = decide(scores, margin=0.05, min_requests=8)
    result = JobResult(job_id="1", scope="tenant:acme", status=JobStatus.REFUSED, gate=gate)
    said = io.StringIO()
    print_outcome(result, Config(), Console(file=said, width=100))
    assert f"{requests} held-out requests, distill.gate_min_held_out is 8" in said.getvalue()
