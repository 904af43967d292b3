"""A git repository with three implementations, and commits on top that change one of them each.

The changes are ones that reviews miss: nothing in them is wrong, and no test of results fails.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

from attnbench.errors import UsageError

FILE, BASE = "attention.py", "base"
PYPROJECT = """[tool.attnbench.gate]
files = ["attention.py"]
seq-lens = "128..1024"
masks = ["causal"]
"""

SOURCE = '''"""Three ways to compute attention."""

import torch

from attnbench.api import attention, attention_builder

CHUNK = 256


@attention("ours-chunked", time="n^2 d", memory="n", gqa=False)
def chunked(q_BHLD, k_BHSD, v_BHSV, *, causal, scale):
    """Keys in chunks, with a running maximum and sum."""
    queries, keys = q_BHLD.shape[2], k_BHSD.shape[2]
    last_L1 = torch.arange(keys - queries, keys).unsqueeze(1)
    top_BHL1 = q_BHLD.new_full((*q_BHLD.shape[:3], 1), float("-inf"))
    sum_BHL1, o_BHLV = torch.zeros_like(top_BHL1), torch.zeros_like(q_BHLD)
    q_BHLD = q_BHLD * scale
    for first in range(0, keys, CHUNK):
        place = slice(first, min(first + CHUNK, keys))
        scores_BHLC = q_BHLD @ k_BHSD[:, :, place].mT
        if causal:
            hidden_LC = torch.arange(place.start, place.stop) > last_L1
            scores_BHLC.masked_fill_(hidden_LC, float("-inf"))
        higher_BHL1 = torch.maximum(top_BHL1, scores_BHLC.amax(-1, keepdim=True))
        weights_BHLC = scores_BHLC.sub_(higher_BHL1).exp_()
        shrink_BHL1 = torch.exp(top_BHL1 - higher_BHL1)
        sum_BHL1 = sum_BHL1 * shrink_BHL1 + weights_BHLC.sum(-1, keepdim=True)
        o_BHLV = o_BHLV * shrink_BHL1 + weights_BHLC @ v_BHSV[:, :, place]
        top_BHL1 = higher_BHL1
    return o_BHLV / sum_BHL1


@attention_builder("ours-masked", time="n^2 d", memory="n^2", masks=("causal",), gqa=False)
def build_masked(case):
    """The whole score matrix, with a mask that is built once."""
    scale, causal = case.softmax_scale, not case.unmasked
    hidden_LS = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)
    hidden_LS = hidden_LS.triu(case.kv_len - case.seq_len + 1)

    def masked(q_BHLD, k_BHSD, v_BHSV):
        scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT
        if causal:
            scores_BHLS.masked_fill_(hidden_LS, float("-inf"))
        return torch.softmax(scores_BHLS, dim=-1) @ v_BHSV

    return masked


@attention("ours-plain", time="n^2 d", memory="n^2", gqa=False)
def plain(q_BHLD, k_BHSD, v_BHSV, *, causal, scale):
    """The whole score matrix, turned into weights in place."""
    scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT
    weights_BHLS = scores_BHLS.sub_(scores_BHLS.amax(-1, keepdim=True)).exp_()
    if causal:
        weights_BHLS.tril_(k_BHSD.shape[2] - q_BHLD.shape[2])
    return (weights_BHLS @ v_BHSV) / weights_BHLS.sum(-1, keepdim=True)
'''


@dataclass(frozen=True, kw_only=True)
class Change:
    """One commit: texts that are replaced, and what the gate must say of it.

    `impl` is the implementation it must name (None: it must pass), by one of `metrics` at least.
    """

    name: str
    title: str
    edits: tuple[tuple[str, str], ...]
    impl: str | None
    metrics: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The file as this commit has it."""
        text = SOURCE
        for old, new in self.edits:
            assert text.count(old) == 1, (
                f"{self.name}: {old!r} stands in the file {text.count(old)} times"
            )
            text = text.replace(old, new)
        return text


CHANGES = (
    Change(
        name="mask-in-call",
        title="causal mask built inside the timed call",
        edits=(
            (
                "    hidden_LS = torch.ones(case.seq_len, case.kv_len, dtype=torch.bool)\n"
                "    hidden_LS = hidden_LS.triu(case.kv_len - case.seq_len + 1)\n",
                "    sizes = case.seq_len, case.kv_len\n",
            ),
            (
                "            scores_BHLS.masked_fill_(hidden_LS",
                "            hidden_LS = torch.ones(sizes, dtype=torch.bool)\n"
                "            hidden_LS = hidden_LS.triu(sizes[1] - sizes[0] + 1)\n"
                "            scores_BHLS.masked_fill_(hidden_LS",
            ),
        ),
        impl="ours-masked",
        metrics=("time", "workspace"),
    ),
    Change(
        name="contiguous",
        title="extra .contiguous() copy of the keys",
        edits=(
            (
                "    scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT\n    weights",
                "    k_BHDS = k_BHSD.mT.contiguous()\n"
                "    scores_BHLS = (q_BHLD * scale) @ k_BHDS\n    weights",
            ),
        ),
        impl="ours-plain",
        metrics=("time", "workspace"),
    ),
    Change(
        name="float64",
        title="upcast to float64",
        edits=(
            (
                "    scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT\n    weights",
                "    dtype = q_BHLD.dtype\n"
                "    q_BHLD, k_BHSD, v_BHSV = q_BHLD.double(), k_BHSD.double(), v_BHSV.double()\n"
                "    scores_BHLS = (q_BHLD * scale) @ k_BHSD.mT\n    weights",
            ),
            (
                "    return (weights_BHLS @ v_BHSV) / weights_BHLS.sum(-1, keepdim=True)",
                "    o_BHLV = (weights_BHLS @ v_BHSV) / weights_BHLS.sum(-1, keepdim=True)\n"
                "    return o_BHLV.to(dtype)",
            ),
        ),
        impl="ours-plain",
        metrics=("time", "workspace"),
    ),
    Change(
        name="chunk-16",
        title="chunk size 16 instead of 256",
        edits=(("CHUNK = 256", "CHUNK = 16"),),
        impl="ours-chunked",
        metrics=("time",),
    ),
    Change(
        name="kept-weights",
        title="O(n²) buffer kept alive",
        edits=(
            ("CHUNK = 256\n", "CHUNK = 256\nLAST = {}  # for debugging\n"),
            (
                "    return (weights_BHLS @ v_BHSV) /",
                '    LAST["weights"] = weights_BHLS\n    return (weights_BHLS @ v_BHSV) /',
            ),
        ),
        impl="ours-plain",
        metrics=("retained",),
    ),
    Change(
        name="refactored",
        title="refactoring that changes nothing",
        edits=(
            (
                '@attention("ours-plain"',
                "def weighted(weights_BHLS, v_BHSV):\n"
                '    """Rows of weights need not sum to 1."""\n'
                "    o_BHLV = weights_BHLS @ v_BHSV\n"
                "    return o_BHLV / weights_BHLS.sum(-1, keepdim=True)\n\n\n"
                '@attention("ours-plain"',
            ),
            (
                "    return (weights_BHLS @ v_BHSV) / weights_BHLS.sum(-1, keepdim=True)",
                "    return weighted(weights_BHLS, v_BHSV)",
            ),
        ),
        impl=None,
    ),
)


def make_repository(folder: Path) -> None:
    """Make the repository in an empty folder: the tag `base`, and a branch for each change.

    Raises:
        UsageError: there is no git, or it cannot do this here.
    """
    _git(folder, "init", "-q", "-b", "main")
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / ".gitignore").write_text("__pycache__/\n")
    _commit(folder, SOURCE, "Three ways to compute attention")
    _git(folder, "tag", BASE)
    for change in CHANGES:
        _git(folder, "checkout", "-q", "-b", change.name, BASE)
        _commit(folder, change.source, change.title)


def check_out(folder: Path, change: Change) -> None:
    """Make the working tree that of a change.

    Raises:
        UsageError: git cannot.
    """
    _git(folder, "checkout", "-q", change.name)


def _commit(folder: Path, source: str, message: str) -> None:
    (folder / FILE).write_text(source)
    _git(folder, "add", "-A")
    _git(folder, "commit", "-q", "-m", message)


# Whoever runs this, with whatever settings of git: no signing, no hooks, no name needed.
_SETTINGS = (
    "-c", "user.name=attnbench", "-c", "user.email=attnbench@localhost", "-c",
    "commit.gpgsign=false", "-c", f"core.hooksPath={os.devnull}",
)  # fmt: skip


def _git(folder: Path, *arguments: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    try:
        done = subprocess.run(
            ["git", *_SETTINGS, *arguments], cwd=folder, env=clean, capture_output=True, text=True
        )
    except OSError as err:
        raise UsageError(f"--cases needs git, which does not start ({err.strerror})") from err
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise UsageError(f"git {arguments[0]} failed in {folder} (--cases): {lines[-1]}")
