"""How the bench starts, asks and stops llama.cpp's server: a stand-in speaks its two routes."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers.llama_server import LlamaServer
from bench.prompts import Prompt
from draftkeep.errors import DraftkeepError
from draftkeep.kernels.sampling import Sampling

# Answers a prompt with its own ids plus 100; writes down its process and its options.
_SERVER = """#!{python}
import json, os, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

options = sys.argv[1:]
with open({notes!r}, "a") as notes:
    notes.write(json.dumps([os.getpid(), options]) + "\\n")

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *words):
        pass
    def reply(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_GET(self):
        self.reply(b"{{}}")
    def do_POST(self):
        job = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if job["prompt"] == [7]:
            self.send_error(500)
            return
        ids = [one + 100 for one in job["prompt"]][: job["n_predict"]]
        self.reply(json.dumps({{"tokens": ids}}).encode())

port = int(options[options.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def _prompt(*ids: int) -> Any:
    return Prompt(domain="d", ids=ids, sampling=Sampling(temperature=0.0), seed=0, max_tokens=2)


@pytest.fixture(name="binary")
def _binary(tmp_path: Path) -> Any:
    path = tmp_path / "server"
    path.write_text(_SERVER.format(python=sys.executable, notes=str(tmp_path / "notes")))
    path.chmod(0o700)
    return path


def _notes(binary: Path) -> Any:
    return [json.loads(line) for line in (binary.parent / "notes").read_text().splitlines()]


def test_answers_come_back_in_the_prompts_order(binary: Any) -> None:
    peer = LlamaServer(binary, Path("t.gguf"), Path("d.gguf"))
    prompts = [_prompt(1, 2, 3), _prompt(4), _prompt(5, 6)]
    for together, calls in ((False, 3), (True, 1)):
        result = peer.run(prompts, draft_tokens=0, together=together)
        assert result.ids == [[101, 102], [104], [105, 106]]
        assert len(result.seconds) == calls
        assert result.rate > 0
    (_, alone), (_, eight) = _notes(binary)
    assert alone[alone.index("-np") + 1] == "1"
    assert eight[eight.index("-np") + 1] == "3"
    assert "-md" not in alone + eight


def test_it_drafts_as_asked_and_is_gone_afterwards(binary: Any) -> None:
    peer = LlamaServer(binary, Path("t.gguf"), Path("d.gguf"))
    assert peer.drafts
    assert not LlamaServer(binary, Path("t.gguf"), None).drafts
    peer.run([_prompt(1)], draft_tokens=4, together=False)
    ((process, options),) = _notes(binary)
    assert options[options.index("-md") + 1] == "d.gguf"
    assert options[options.index("--spec-draft-n-max") + 1] == "4"
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_what_fails_is_an_error_that_says_so(binary: Any) -> None:
    peer = LlamaServer(binary, Path("t.gguf"), None)
    with pytest.raises(DraftkeepError, match="answered 500"):
        peer.run([_prompt(7)], draft_tokens=0, together=False)
    with pytest.raises(ProcessLookupError):
        os.kill(_notes(binary)[0][0], 0)
    missing = LlamaServer(binary.parent / "none", Path("t.gguf"), None)
    with pytest.raises(DraftkeepError, match="did not start"):
        missing.run([_prompt(1)], draft_tokens=0, together=False)
    dying = LlamaServer(Path(sys.executable), Path("t.gguf"), None)
    with pytest.raises(DraftkeepError, match="not become ready"):
        dying.run([_prompt(1)], draft_tokens=0, together=False)
