"""What must hold of a trace before it is packed."""

from draftkeep.errors import CodecError
from draftkeep.ingest.trace import How, TopK, Trace

MAX_ROWS = 2**20
MAX_CELLS = 2**24
MAX_BRANCHES = 2**16


def check_trace(trace: Trace) -> None:
    """Raise CodecError unless the arrays of a trace agree with one another and fit a body."""
    positions = trace.positions
    lengths = {
        "topk": len(trace.topk),
        "how": len(trace.how_T),
        "rejected": len(trace.rejected_T),
        "drafters": sum(run.positions for run in trace.drafters) if trace.drafters else positions,
        "processed log p": positions
        if trace.processed_logprob_T is None
        else len(trace.processed_logprob_T),
    }
    for name, length in lengths.items():
        if length != positions:
            raise CodecError(f"trace has {length} positions of {name}, expected {positions}")
    if positions and trace.how_T.max() > max(How):
        raise CodecError(f"trace has a position of kind {trace.how_T.max()}, which is not defined")
    if (trace.rejected_T[trace.how_T != How.CORRECTED] != -1).any():
        raise CodecError("trace has a rejected draft at a position that was not corrected")
    check_branches(tuple((branch.start, len(branch.draft_ids_N)) for branch in trace.branches))
    for branch in trace.branches:
        if len(branch.topk) != len(branch.draft_ids_N):
            raise CodecError("trace has a branch with more drafts than distributions, or fewer")
    topks = [trace.topk, *(branch.topk for branch in trace.branches)]
    for topk in topks:
        _check_topk(topk)
    rows = sum(map(len, topks))
    if rows > MAX_ROWS or rows * max(topk.ids_TK.shape[1] for topk in topks) > MAX_CELLS:
        raise CodecError(f"trace of {rows} positions is too large for a body; cut its positions")


def check_branches(branches: tuple[tuple[int, int], ...]) -> None:
    """Raise CodecError unless the (start, drafts) pairs of a trace's branches are in bounds."""
    if len(branches) > MAX_BRANCHES:
        raise CodecError(f"trace has {len(branches)} branches, at most {MAX_BRANCHES} fit")
    if any(drafts < 1 for _, drafts in branches):
        raise CodecError("trace has a branch without drafts")


def _check_topk(topk: TopK) -> None:
    rows, width = topk.ids_TK.shape
    shapes = (topk.logprobs_TK.shape, topk.k_T.shape, topk.tail_T.shape, topk.tail_known_T.shape)
    if shapes != ((rows, width), (rows,), (rows,), (rows,)):
        raise CodecError("trace has lists whose arrays differ in shape; check the emitter")
    if rows and topk.k_T.max() > width:
        raise CodecError(f"trace has a list of {topk.k_T.max()} entries in {width} columns")
