"""A run's folder: that it belongs to this run alone, what run.json keeps, and its files of JSON lines.

What a step is, and which of its numbers are written, is log.py's business."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import platform
import shutil
import subprocess
import sys
import time
import uuid
from importlib import metadata
from pathlib import Path

import torch

from engine.base import UserError, stable_hash, write_atomically
from engine.ranks import all_gather, on_rank_0, rank_and_ranks, same_on_all_ranks

# JSON without spaces, and characters as they are: an escape takes twice the bytes of most of them
compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


class RunFolder:
    """The folder --out. Only rank 0 writes there; if it fails, every rank raises the same error."""

    def __init__(self, options: dict, device, identity: dict):
        """options: all, by name. identity: data.digests'. Raises UserError if the folder cannot be used."""
        self.options, self.device, (self.rank, ranks) = options, device, rank_and_ranks()
        name = f"{script_name()}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.path = Path(all_gather(options["out"] or f"runs/{name}")[0])  # a clock and a process id differ
        # identity: what must not change in a resume, by names for errors; earlier: that in run.json before
        # this start
        self.identity, self.earlier = {}, {}
        self.record = describe(options, ranks, device)
        on_rank_0(self._open)
        self._log_warnings()
        # a --resume that is refused must leave run.json as it was, so that it is refused again
        self.identify(identity, write=not self.earlier)

    def _open(self) -> None:
        """Refuse a folder that is not this run's, lock it, and read what a resumed run was."""
        out, wrong = self.path, f"--out is '{self.path}', "
        # else two runs would be read as one, and evaluate.py would write over another results.json
        if not self.options["resume"] and any(out.glob("*")):
            raise UserError(f"{wrong}which is not empty; give another folder (--resume continues a run).")
        out.mkdir(parents=True, exist_ok=True)
        self.lock = (out / "lock").open("a")
        try:  # the system lets go of it when this process dies, however it dies
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(wrong + "in which another process is running; give another folder.") from None
        except OSError:  # some network file systems have no locks
            pass
        if self.options["resume"]:
            run = read_run(out)
            self.earlier, self.record["id"] = run["identity"], run.get("id")
            if run.get("code") != self.record["code"]:  # whose steps then come from two methods
                print(f"Warning: --resume: this is other code than the run in '{out}' began with.")
            self.record["before"] = [*run.pop("before", []), run]  # the run's earlier starts, oldest first
        elif Path(sys.argv[0]).is_file():
            shutil.copyfile(sys.argv[0], out / "script.py")

    def _log_warnings(self) -> None:
        """The libraries' warnings, and tracebacks, also go to a file of this rank."""
        self.path.mkdir(parents=True, exist_ok=True)  # on a node that does not see rank 0's
        logging.captureWarnings(True)
        logging.basicConfig(filename=self.path / f"rank_{self.rank}.log", force=True,
                            format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger().addHandler(logging.lastResort)  # the terminal

    def identify(self, content: dict[str, int], write: bool = True) -> None:
        """Keep in run.json what all ranks must share, and a resumed run with the one before it.

        Raises UserError, naming the entry, if they do not."""
        same_on_all_ranks(content)
        changed = [name for name, value in content.items() if self.earlier.get(name, value) != value]
        if changed := all_gather(changed)[0]:
            raise UserError(f"--resume: {changed[0]} differs from what the run in '{self.path}' had; start a "
                            "new run.")
        self.identity |= content
        if self.rank == 0 and write:
            record = self.record | dict(identity=self.identity)
            write_atomically(self.path / "run.json", json.dumps(record, indent=1))

    def append(self, name: str, record: dict) -> None:
        """Add a line to a .jsonl file of the run."""
        if self.rank == 0:
            with (self.path / name).open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.write(compact(record) + "\n")  # a lone surrogate becomes \ud800, as in JSON

    def lines(self, name: str) -> list[dict]:
        """The lines of a .jsonl file of the run, on all ranks."""
        return on_rank_0(lambda: read_jsonl(self.path / name))

    def keep_lines(self, name: str, steps) -> list[dict]:
        """The lines of these steps, on all ranks; the others are dropped from the file."""
        lines = [line for line in self.lines(name) if line.get("step") in steps]
        if self.rank == 0 and (self.path / name).exists():
            write_atomically(self.path / name, "".join(compact(line) + "\n" for line in lines))
        return lines


# ----------------------------------------------- what run.json holds ----------------------------------------
def script_name() -> str:
    """The name that run folders and run.json know a script by: ttrl.py is ttrl."""
    return Path(sys.argv[0]).stem


def code_digest(script: Path) -> int:
    """Hash of a run's script, common.py, answers/, engine/ and the toys: whether two runs are of one code."""
    root, files = Path(__file__).parent.parent, [script]
    for pattern in ("common.py", "answers/*.py", "engine/*.py", "toy/**/*.json*", "toy/**/*.safetensors"):
        files += sorted(root.glob(pattern))
    return stable_hash([file.read_bytes() for file in files if file.is_file()])


def describe(options: dict, ranks: int, device) -> dict:
    """What run.json holds: script, command line, arguments, hardware, versions, git state, code, time, and an
    id of the run's own, which its checkpoints hold, too."""
    git = ""  # also where there is no git, as in a slim container
    with contextlib.suppress(OSError):
        git = subprocess.run("git describe --always --dirty --abbrev=40 --exclude=*".split(),
                             cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()
    versions = {package.name: package.version for package in metadata.distributions()}
    hardware = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "cpu"
    return dict(script=script_name(), command=sys.argv, args=options, ranks=ranks,
                device=hardware, python=platform.python_version(), versions=versions,
                git=git, code=code_digest(Path(sys.argv[0])), id=uuid.uuid4().hex[:8],
                started=time.strftime("%Y-%m-%dT%H:%M:%S"))


# ---------------------------------------------- reading a run's files ---------------------------------------
def read_run(folder: Path) -> dict:
    """run.json of a run folder."""
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def read_jsonl(path: Path) -> list[dict]:
    """The objects in a file's lines; none if there is no file. A killed run may leave half a last line."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if path.exists() else []:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return records


def read_metrics(folder: Path) -> list[dict]:
    """A run's metrics, one dict per step: its line of metrics.jsonl and that of its evaluation, together."""
    steps = {}
    for line in read_jsonl(Path(folder) / "metrics.jsonl"):
        steps[line.get("step")] = steps.get(line.get("step"), {}) | line
    return list(steps.values())


def has_evaluation(line: dict) -> bool:
    """Whether a line of metrics.jsonl is an evaluation's."""
    return any(name.startswith("eval/") for name in line)
