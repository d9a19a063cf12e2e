"""A small mutation tester: which changes of a script's method and loop do its tests not notice?

    python -m tools.mutate scrl.py                        # every mutant
    python -m tools.mutate --sample 40 --jobs 2           # 40 of each of the six scripts, two at a time
    python -m tools.mutate ttrl.py --tests "python -m pytest -x -q -m quick {file} tests/test_{name}.py"
    python -m tools.mutate scrl.py --list                 # only list them

In --tests, {file} is scrl.py and {name} is scrl; the default is the script's tests, the quick ones first.
Mutated is what stands between "# --- the method" (or the file's start) and "if __name__": + and -, * and /,
comparisons, and / or, not, min / max, mean / sum, any / all, signs, constants, conditions (true, false),
returned values, the order of a call's first two arguments, break / continue; statements are deleted. Texts,
annotations and docstrings with their doctests are not mutated. Each mutant is written to a copy of the
repository, in which the tests run. Tests that fail or take too long have killed it.

Results go to --out, one line of JSON each; called again, it goes on. A changed file or another --tests starts
anew; --again tests those that survived once more, for new tests.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = ["ttrl.py", "evol_rl.py", "scrl.py", "restrain.py", "ettrl.py", "dynamic_rl.py"]
TESTS = ("python -m pytest -x -q -m quick {file} tests/test_scripts.py -k '{file} or [{name}' && "
         "python -m pytest -x -q tests/test_scripts.py tests/test_{name}.py -k '{file} or [{name}'")
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
             ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr}
COMPARISONS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
               ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In}
NAMES = {"min": "max", "max": "min", "mean": "sum", "fmean": "sum", "any": "all", "all": "any"}
COPIED_NOT = shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", ".pytest_cache", ".ruff_cache")


@dataclass(frozen=True)
class Mutant:
    """Bytes `start` to `end` of a file replaced by `new`."""
    file: str
    line: int
    start: int
    end: int
    old: str
    new: str

    def applied(self, source: str) -> str:
        text = source.encode()
        return (text[:self.start] + self.new.encode() + text[self.end:]).decode()

    def __str__(self) -> str:
        old, new = (re.sub(r"\s+", " ", text) for text in (self.old, self.new))
        return f"{self.file}:{self.line}: {old}  ->  {new}"


# ------------------------------------------------ mutants -------------------------------------------------
def constant(value) -> list:
    """What a number or truth value is replaced by; texts and None by nothing."""
    if isinstance(value, bool):
        return [not value]
    if not isinstance(value, (int, float)):
        return []
    if value in (0, 1):
        return [type(value)(1 - value)]
    return [value + 1 if isinstance(value, int) else 2 * value]


def changed(node: ast.AST, **fields) -> ast.AST:
    """A copy of a node with other fields."""
    new = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(new, name, value)
    return new


def replacements(node: ast.AST) -> list[ast.AST]:
    """What one node may be replaced by, its children being left alone."""
    if isinstance(node, (ast.BinOp, ast.AugAssign)) and type(node.op) in OPERATORS:
        found = [changed(node, op=OPERATORS[type(node.op)]())]
    elif isinstance(node, ast.BoolOp):
        found = [changed(node, op=ast.Or() if isinstance(node.op, ast.And) else ast.And())]
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        found = [node.operand]
    elif isinstance(node, ast.Compare):
        found = []
        for i, op in enumerate(node.ops):
            found.append(changed(node, ops=[*node.ops[:i], COMPARISONS[type(op)](), *node.ops[i + 1:]]))
    elif isinstance(node, ast.Constant):
        found = [ast.Constant(value) for value in constant(node.value)]
    elif isinstance(node, ast.Call):
        found = called_otherwise(node)
    elif isinstance(node, ast.Return) and node.value is not None:
        found = [changed(node, value=ast.Constant(None))]
        if isinstance(node.value, (ast.Compare, ast.BoolOp)):
            found.append(changed(node, value=ast.UnaryOp(ast.Not(), node.value)))
        elif isinstance(node.value, (ast.BinOp, ast.Call, ast.IfExp, ast.Name, ast.Subscript)):
            found.append(changed(node, value=ast.UnaryOp(ast.USub(), node.value)))
    elif isinstance(node, (ast.Break, ast.Continue)):
        found = [ast.Continue() if isinstance(node, ast.Break) else ast.Break()]
    else:
        found = []
    if deletable(node):
        found.append(ast.Pass())
    return found


def called_otherwise(call: ast.Call) -> list[ast.Call]:
    """f(b, a) for f(a, b); min(a, b) for max(a, b); a.sum() for a.mean()."""
    found = []
    first = call.args[:2]
    if len(first) == 2 and not any(isinstance(arg, ast.Starred) for arg in first):
        symmetric = ast.unparse(call.func).split(".")[-1] in ("min", "max", "minimum", "maximum")
        if ast.dump(first[0]) != ast.dump(first[1]) and not symmetric:
            found.append(changed(call, args=[first[1], first[0], *call.args[2:]]))
    if isinstance(call.func, ast.Name) and call.func.id in NAMES:
        found.append(changed(call, func=ast.Name(NAMES[call.func.id])))
    if isinstance(call.func, ast.Attribute) and call.func.attr in NAMES:
        found.append(changed(call, func=changed(call.func, attr=NAMES[call.func.attr])))
    return found


def deletable(node: ast.AST) -> bool:
    """A statement without which the code still runs: a call, x += 1, x = f(x), x.y = 1, x[0] = 1, raise."""
    if isinstance(node, (ast.AugAssign, ast.Raise)):
        return True
    if isinstance(node, ast.Assign):
        names = {name.id for name in ast.walk(node.value) if isinstance(name, ast.Name)}
        target = node.targets[0]
        return target.id in names if isinstance(target, ast.Name) else not isinstance(target, ast.Tuple)
    return isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant)


def parts(node: ast.AST) -> list[tuple[ast.AST, bool]]:
    """(node, whether it is a condition) of everything below that may be mutated: no annotations, no texts."""
    found = []
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                condition = name in ("test", "ifs") and not isinstance(node, ast.Assert)
                found += [(child, condition), *parts(child)]
    return found


def mutants(file: str, source: str) -> list[Mutant]:
    """All mutants of a file, in the order of the text."""
    lines = source.splitlines(keepends=True)
    begins = [0]
    for line in lines:
        begins.append(begins[-1] + len(line.encode()))
    first = next((i for i, line in enumerate(lines, 1) if re.match(r"# -+ the method -+", line)), 1)
    last = next((i for i, line in enumerate(lines, 1) if line.startswith("if __name__")), len(lines) + 1)
    found = {}
    for node, condition in parts(ast.parse(source)):
        if not first <= getattr(node, "lineno", 0) < last:
            continue
        new = replacements(node) + ([ast.Constant(True), ast.Constant(False)] if condition else [])
        start = begins[node.lineno - 1] + node.col_offset
        end = begins[node.end_lineno - 1] + node.end_col_offset
        old = source.encode()[start:end].decode()
        for replacement in new:
            text = ast.unparse(replacement)
            if text == ast.unparse(node):
                continue
            if isinstance(node, ast.expr) and not isinstance(replacement, ast.Constant):
                text = f"({text})"
            found[start, end, text] = Mutant(file, node.lineno, start, end, old, text)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end))


# ------------------------------------------------ running ------------------------------------------------
class Worker:
    """A copy of the repository in which one mutant after another stands in for its file."""

    def __init__(self, root: Path, folder: Path):
        self.folder, self.log = folder, folder.with_suffix(".log")
        self.process = self.mutant = None
        shutil.copytree(root, folder, ignore=COPIED_NOT)
        if (root / ".venv").exists():
            (folder / ".venv").symlink_to((root / ".venv").resolve())

    def write(self, file: str, source: str) -> None:
        path = self.folder / file
        path.write_text(source, encoding="utf-8")
        for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
            stale.unlink()  # Python tells versions apart by size and second, which may be equal

    def start(self, file: str, source: str, tests: str) -> None:
        """Begin the tests of a file, in a session of their own, with this Python."""
        self.write(file, source)
        command = tests.replace("{file}", file).replace("{name}", Path(file).stem)
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": search, "OMP_NUM_THREADS": "1"}
        self.began = time.time()
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, shell=True, cwd=self.folder, env=env, stdout=log,
                                            stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)

    def result(self, limit: float) -> str:
        """killed, survived, timeout (after `limit` seconds), or "" if the tests still run."""
        status = self.process.poll()
        if status is None:
            return "timeout" if time.time() - self.began > limit else ""
        return "killed" if status else "survived"

    def end(self) -> None:
        """End the tests and all that they started."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def key_of(mutant: Mutant, source: str, tests: str) -> str:
    """Equal for the same change of the same text under the same tests."""
    parts = (mutant.file, mutant.start, mutant.end, mutant.new, source, tests)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def read_results(out: Path) -> dict[str, str]:
    """{key: result}; a half-written line is skipped."""
    results = {}
    for line in out.read_text(encoding="utf-8").splitlines() if out.exists() else []:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            record = json.loads(line)
            results[record["key"]] = record["result"]
    return results


def run(todo: list[Mutant], sources: dict[str, str], root: Path, tests: str, jobs: int, limit: float):
    """Yield (mutant, result, seconds) of all, `jobs` at a time.

    A limit of 0 seconds is three times what the unchanged file takes, and 10 more. Raises ValueError if the
    unchanged file fails its tests."""
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        workers = [Worker(root, Path(folder) / str(i)) for i in range(jobs)]
        try:
            limits = {}
            for file in dict.fromkeys(mutant.file for mutant in todo):
                workers[0].start(file, sources[file], tests)
                if workers[0].process.wait():
                    output = workers[0].log.read_text(errors="replace")[-3000:]
                    raise ValueError(f"{file} fails its tests unchanged:\n{output}")
                limits[file] = limit or 3 * (time.time() - workers[0].began) + 10
            waiting, idle, busy = list(todo), list(workers), []
            while waiting or busy:
                while waiting and idle:
                    worker, mutant = idle.pop(), waiting.pop(0)
                    worker.mutant = mutant
                    worker.start(mutant.file, mutant.applied(sources[mutant.file]), tests)
                    busy.append(worker)
                time.sleep(0.05)
                for worker in list(busy):
                    mutant = worker.mutant
                    result = worker.result(limits[mutant.file])
                    if result:
                        worker.end()
                        worker.write(mutant.file, sources[mutant.file])
                        busy.remove(worker)
                        idle.append(worker)
                        yield mutant, result, time.time() - worker.began
        finally:
            for worker in workers:
                worker.end()


def report(chosen: list[Mutant], result_of: dict[Mutant, str]) -> str:
    """A table per file, then the survivors."""
    lines = [f"{'':18}{'mutants':>9}{'killed':>8}{'timeout':>9}{'survived':>10}{'score':>8}"]
    for file in dict.fromkeys(mutant.file for mutant in chosen):
        results = [result_of[mutant] for mutant in chosen if mutant.file == file]
        timeouts, survived = results.count("timeout"), results.count("survived")
        lines.append(f"{file:18}{len(results):9}{results.count('killed'):8}{timeouts:9}{survived:10}"
                     f"{1 - survived / len(results):8.1%}")
    survivors = [mutant for mutant in chosen if result_of[mutant] == "survived"]
    return "\n".join(lines + ["", "Survivors:" if survivors else "No survivors.", *map(str, survivors)])


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tools.mutate", description=__doc__, formatter_class=shape)
    parser.add_argument("files", nargs="*", help="relative to the repository; default: the six scripts")
    parser.add_argument("--sample", type=int, default=0, help="so many mutants of each file; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="mutants at a time, one core each")
    parser.add_argument("--tests", default=TESTS, help="a shell command, run in the copy")
    parser.add_argument("--timeout", type=float, default=0.0, help="seconds; 0: thrice the unchanged one's")
    parser.add_argument("--out", type=Path, default=ROOT / "runs/mutants.jsonl", help="file of the results")
    parser.add_argument("--again", action="store_true", help="test those that survived once more")
    parser.add_argument("--list", action="store_true", help="list the mutants and test nothing")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository")
    options = parser.parse_args()
    files = options.files or SCRIPTS
    for flag, value, least in (("--jobs", options.jobs, 1), ("--sample", options.sample, 0)):
        if value < least:
            parser.error(f"{flag} is {value}, but must be at least {least}.")
    for file in files:
        if not (options.root / file).is_file():
            parser.error(f"there is no file '{file}' in {options.root}; give files relative to it.")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the tests are ended, too

    sources = {file: (options.root / file).read_text(encoding="utf-8") for file in files}
    chosen: list[Mutant] = []
    for file in files:
        every = mutants(file, sources[file])
        count = min(options.sample or len(every), len(every))
        picked = random.Random(options.seed).sample(every, count)
        chosen += sorted(picked, key=every.index)
    if options.list:
        print(*chosen, f"{len(chosen)} mutants", sep="\n")
        return
    keys = {mutant: key_of(mutant, sources[mutant.file], options.tests) for mutant in chosen}
    stored = read_results(options.out)
    result_of = {mutant: stored[key] for mutant, key in keys.items() if key in stored}
    open_results = (None, "survived") if options.again else (None,)
    todo = [mutant for mutant in chosen if result_of.get(mutant) in open_results]
    print(f"{len(chosen)} mutants, {len(todo)} to test; results in {options.out}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        results = run(todo, sources, options.root, options.tests, options.jobs, options.timeout)
        if options.out.exists() and not options.out.read_bytes().endswith(b"\n"):
            options.out.open("a").write("\n")  # a killed run left its last line half-written
        for done, (mutant, result, seconds) in enumerate(results, 1):
            result_of[mutant] = result
            print(f"{done:4}/{len(todo)} {seconds:6.1f} s  {result:9}{mutant}", flush=True)
            record = dict(key=keys[mutant], result=result, seconds=round(seconds, 1), mutant=str(mutant))
            with options.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
    except ValueError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nStopped; the same command goes on.", file=sys.stderr)
        sys.exit(130)
    print(report(chosen, result_of))


if __name__ == "__main__":
    main()
