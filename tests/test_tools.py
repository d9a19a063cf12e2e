"""The tools: drawing runs, comparing, mutating; each on a few hand-made lines."""

import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
from conftest import EXAMPLES, ROOT

from engine.base import UserError
from tools import compare, mutate, plot


def make_run(folder: Path, lines: list[str], args: dict | None = None, script: str = "ttrl") -> Path:
    """A run folder with these lines in metrics.jsonl and these arguments in run.json."""
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    if args is not None:
        (folder / "run.json").write_text(json.dumps(dict(script=script, args=args)))
    return folder


def exit_and_sentence(tool, monkeypatch, capsys, *flags: str) -> tuple[int, str]:
    """Exit code and what a tool writes to stderr for these flags."""
    monkeypatch.setattr(sys, "argv", [tool.__name__, *flags])
    with pytest.raises(SystemExit) as left:
        tool.main()
    return left.value.code, capsys.readouterr().err.strip()


# ------------------------------------------------- plot ---------------------------------------------------
LINES = ['{"step": 0, "eval/toy/pass@1": 0.25, "eval/toy/pass@4": 0.5, "eval/other/pass@1": 0.1}',
         '{"step": 1, "entropy": 0.5, "label_coverage": 1, "agreeing/16": 3}',
         "[1, 2]", '"text"', "", '{"no": "step"}', '{"step": "1"}',
         '{"step": 2, "entropy": NaN, "length": null}',
         '{"step": 3, "entropy": 1.5, "label_coverage": 0.5, "eval/toy/pass@1": 0.75}',
         '{"step": 3, "negative_coverage": 0}',
         '{"step": 5, "entropy": ' + "9" * 400 + "}", '{"step": 1' + "0" * 400 + "}",
         '{"step": 6, "length": "x"}',
         '{"step": 4, "entr']  # a killed run leaves its last line half-written


def test_half_written_and_foreign_lines_are_skipped(tmp_path):
    lines = plot.read_metrics(make_run(tmp_path / "run", LINES))
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 3, 5, 6]
    assert plot.series(lines, "entropy") == {1: 0.5, 3: 1.5}  # NaN is left out
    assert plot.series(lines, "entropy", smooth=2) == {1: 0.5, 3: 1.0}
    assert plot.series(lines, "length") == {}


def test_plot_draws_the_chosen_panels_of_a_cut_off_run(tmp_path, monkeypatch):
    titles = []
    def keep(axis, title, panel, order, behind):
        titles.append((title, panel))

    monkeypatch.setattr(plot, "draw_panel", keep)
    folder = make_run(tmp_path / "run", LINES)
    plot.plot([folder], tmp_path / "new/out.png")
    assert (tmp_path / "new/out.png").stat().st_size > 1000
    assert [title for title, _ in titles] == ["pass@1 on toy", "pass@4 on toy", "token entropy (nats)",
                                              "prompts with a label (SCRL, RESTRAIN)"]  # not the flat zeros
    assert titles[0][1] == {"run": [{0: 0.25, 3: 0.75}]}
    titles.clear()
    plot.plot([folder], tmp_path / "out.png", benchmark="other", panels=["entropy", "pass@1"])
    assert [title for title, _ in titles] == ["token entropy (nats)", "pass@1 on other"]
    titles.clear()
    plot.plot([folder], tmp_path / "out.png", panels=["agreeing/16", "negative_coverage", "length"])
    assert titles == [("agreeing/16", {"run": [{1: 3}]}),
                      ("SCRL: prompts with a negative label", {"run": [{3: 0}]})]


def test_seeds_are_one_line_and_share_their_steps(tmp_path):
    from matplotlib import pyplot
    first = make_run(tmp_path / "a-seed1", ['{"step": 1, "length": 10}', '{"step": 2, "length": 20}'])
    second = make_run(tmp_path / "a-seed2", ['{"step": 1, "length": 30}'])
    other = make_run(tmp_path / "else/a-seed1", ['{"step": 1, "length": 5}'])
    assert list(plot.read_runs([first, second])) == ["a"]
    assert len(plot.read_runs([first, second, other])) == 2  # another folder's runs are other runs
    _, axis = pyplot.subplots()
    plot.draw_panel(axis, "length", {"a": [{1: 10.0, 2: 20.0}, {1: 30.0}]}, ["a"])
    assert axis.lines[0].get_xdata().tolist() == [1] and axis.lines[0].get_ydata().tolist() == [20.0]
    pyplot.close()


def test_one_stands_behind_all_others(tmp_path):
    curves = [("length", {"a": [{1: 1.0}], "b": [{1: 2.0}], "c": [{1: 3.0}]}), ("entropy", {"c": [{1: 4.0}]})]
    single = plot.one_by_one(curves, ["a", "b", "c"], "b")
    assert single == [("a\nlength", {"b": [{1: 2.0}], "a": [{1: 1.0}]}),
                      ("c\nlength", {"b": [{1: 2.0}], "c": [{1: 3.0}]}), ("c\nentropy", {"c": [{1: 4.0}]})]
    runs = [make_run(tmp_path / name, LINES) for name in ("a", "b")]
    plot.plot(runs, tmp_path / "out.png", panels=["entropy"], behind="a")
    assert (tmp_path / "out.png").stat().st_size > 5000


def test_largest_k_is_one_that_all_runs_have():
    two = {"eval/b/pass@1": 0, "eval/b/pass@2": 0}
    four = {"eval/c/pass@1": 0, "eval/b/pass@2": 0, "eval/b/pass@4": 0}
    assert plot.choose_benchmark([[two], [four], [{}]]) == ("b", 2)
    assert plot.choose_benchmark([[four]], "c") == ("c", 1)
    assert plot.choose_benchmark([[{"step": 1}]]) == ("", 1)


def test_bad_input_of_plot_is_one_sentence(tmp_path, monkeypatch, capsys):
    run, empty = make_run(tmp_path / "run", LINES), make_run(tmp_path / "empty", ["{"])
    for folders, words in [([], "no run to draw"), ([tmp_path / "nowhere"], "there is no folder"),
                           ([empty], "holds no run")]:
        with pytest.raises(UserError, match=words):
            plot.plot(folders, tmp_path / "out.png")
    for options, words in [(dict(benchmark="aime"), "evaluated on toy, other"),
                           (dict(panels=["loss"]), "'loss'"),
                           (dict(panels=["entropy"], behind="b"), "--behind is 'b', but must be of run")]:
        with pytest.raises(UserError, match=words):
            plot.plot([run], tmp_path / "out.png", **options)
    with pytest.raises(UserError, match="must end in one of"):
        plot.plot([run], tmp_path / "out.xyz")
    code, sentence = exit_and_sentence(plot, monkeypatch, capsys, "nowhere")
    assert code == 2 and sentence == "Error: there is no folder 'nowhere'; give the folder of a run."
    code, sentence = exit_and_sentence(plot, monkeypatch, capsys, str(run), "-o", "/proc/no/out.png")
    assert code == 2 and sentence.startswith("Error: --out is '/proc/no/out.png', which cannot be written")


# ------------------------------------------------ compare -------------------------------------------------
ARGS = dict(labels="gold", seed=1, steps=5, eval="toy,toy_test", eval_every=10, eval_samples=32, rda=False)


def job(folder: Path, steps: int = 5, command: str = "ttrl.py --labels gold --no-rda") -> compare.Job:
    return compare.jobs_of({folder.name: command}, [1], steps, folder.parent)[folder.name][0]


def test_jobs_have_the_methods_flags_and_the_runs():
    one = job(Path("/x/gold"))
    assert one.folder == Path("/x/gold-seed1")
    assert one.command[:4] == ["ttrl.py", "--labels", "gold", "--no-rda"]
    assert one.wanted() == {name: str(value) for name, value in ARGS.items()}
    for variants in compare.SETS.values():
        for command in variants.values():
            script = job(Path("/x"), command=command).command[0]
            assert (ROOT / script).exists() or script.removesuffix(".py") in EXAMPLES
    assert len(compare.SETS["examples"]) == 1 + len(EXAMPLES)
    real = job(Path("/x/TTRL"), command=compare.SETS["smollm2"]["TTRL"]).wanted()
    assert real["eval"] == "smollm2,smollm2_test,smollm2_ood" and real["eval_every"] == "0"


def test_a_run_counts_as_finished_only_with_the_same_arguments(tmp_path):
    assert job(tmp_path / "new").state() == "new"
    folder = make_run(tmp_path / "run-seed1", LINES, ARGS)
    assert job(tmp_path / "run").state() == "unfinished"
    (folder / "final").mkdir()
    assert job(tmp_path / "run").state() == "finished"
    with pytest.raises(UserError, match="holds a run with --steps 5, not 40; give another folder"):
        job(tmp_path / "run", steps=40).state()
    with pytest.raises(UserError, match="--labels gold, not majority"):
        job(tmp_path / "run", command="ttrl.py --labels majority").state()
    with pytest.raises(UserError, match="a run of ttrl.py, not rent.py"):
        job(tmp_path / "run", command="rent.py").state()
    with pytest.raises(UserError, match="a run of ttrl.py, not scrl.py"):
        job(tmp_path / "run", command="scrl.py").state()
    (folder / "run.json").write_text('{"script": "ttrl"')
    with pytest.raises(UserError, match="without a readable run.json"):
        job(tmp_path / "run").state()


def test_bad_input_of_compare_is_one_sentence(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)  # pytest keeps its own handlers
    code, sentence = exit_and_sentence(compare, monkeypatch, capsys, "--workers", "0")
    assert code == 2 and sentence == "Error: --workers is 0, but must be at least 1."
    code, sentence = exit_and_sentence(compare, monkeypatch, capsys, "--out", __file__)
    assert code == 2 and sentence == f"Error: --out is '{__file__}', but must be a folder."
    code, sentence = exit_and_sentence(compare, monkeypatch, capsys, "--out", f"{__file__}/x")
    assert code == 2 and "Error: [Errno 20] Not a directory: " in sentence
    with pytest.raises(UserError, match="--seeds has -1, but must have whole numbers from 0 on"):
        compare.compare("main", [1, -1], 1, 1, tmp_path)
    with pytest.raises(UserError, match="--steps is 0"):
        compare.compare("main", [1], 0, 1, tmp_path)


GOOD = "import os, sys\nfor name in ('final', 'checkpoints'):\n    os.mkdir(sys.argv[-1] + '/' + name)\n"
SLOW = "import os, time\nopen('pid', 'w').write(str(os.getpid()))\ntime.sleep(99)\n"


def test_a_failed_run_is_named_and_the_others_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    (tmp_path / "bad.py").write_text("raise SystemExit(3)")
    (tmp_path / "slow.py").write_text(SLOW)
    (tmp_path / "good.py").write_text(GOOD)
    (good,) = compare.jobs_of({"good": "good.py"}, [1], 5, tmp_path)["good"]
    compare.run_all([good], workers=1)
    assert (good.folder / "final").exists() and not (good.folder / "checkpoints").exists()
    jobs = compare.jobs_of({"slow": "slow.py", "bad": "bad.py"}, [1], 5, tmp_path)
    with pytest.raises(UserError, match=r"a run failed; see .*bad-seed1.log.txt"):
        compare.run_all(jobs["slow"] + jobs["bad"], workers=2)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()


def test_a_fork_that_cannot_be_made_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "ROOT", tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples/good.diff").write_text("")
    jobs = compare.jobs_of({"good": "good.py"}, [1], 5, tmp_path)["good"]
    with pytest.raises(UserError, match="`make good.py` failed; make says above which hunk does not fit"):
        compare.run_all(jobs, workers=1)
    (tmp_path / "good.txt").write_text(GOOD)
    (tmp_path / "Makefile").write_text("good.py:\n\tcp good.txt good.py\n")
    compare.run_all(jobs, workers=1)
    assert (jobs[0].folder / "final").exists()


def test_the_real_models_runs_have_a_folder_of_their_own(monkeypatch):
    """They have the names of the toy's. The figure is of problems that are not trained on."""
    seen, drawn = [], mock.Mock()
    monkeypatch.setattr(compare.signal, "signal", lambda *_: None)
    monkeypatch.setattr(compare, "run_all", lambda jobs, workers: seen.append(jobs[0].folder))
    monkeypatch.setattr(compare, "table", lambda *_: "")
    monkeypatch.setattr(compare.plot, "plot", drawn)
    monkeypatch.setattr(compare.Path, "write_text", lambda *_, **__: 0)
    for name in ("main", "smollm2"):
        monkeypatch.setattr(sys, "argv", ["compare", "--set", name])
        compare.main()
    assert [folder.parent.name for folder in seen] == ["compare", "compare-smollm2"]
    assert drawn.call_args_list[0].kwargs == {}
    assert drawn.call_args_list[1].kwargs["benchmark"] == "smollm2_test"


def test_termination_of_compare_ends_its_runs(tmp_path):
    """A process that compares a script that sleeps is sent SIGTERM."""
    (tmp_path / "slow.py").write_text(SLOW)
    code = f"""
import sys
from pathlib import Path
from tools import compare
compare.ROOT, compare.SETS["main"] = Path({str(tmp_path)!r}), {{"slow": "slow.py"}}
sys.argv = ["compare", "--seeds", "1", "--out", {str(tmp_path / "out")!r}]
compare.main()
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    pid = tmp_path / "pid"
    for _ in range(1200):  # it takes half a minute to start on a busy machine
        if pid.exists() and pid.read_text():
            break
        time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 143
    assert not Path(f"/proc/{pid.read_text()}").exists()


def test_table_is_the_last_evaluation_and_the_mean_of_the_last_ten_steps(tmp_path):
    # the last ten: 3 to 12, mean 7.5
    steps = [f'{{"step": {i}, "entropy": {i}, "length": 7}}' for i in range(1, 13)]
    for seed, rate in ((1, 0.5), (2, 0.7)):  # mean 0.6, deviation 0.1 sqrt(2) = 0.14
        ends = [f'{{"step": 0, "eval/toy/pass@1": {rate / 2}}}', f'{{"step": 12, "eval/toy/pass@1": {rate}}}']
        make_run(tmp_path / f"a-seed{seed}", ends[:1] + steps + ends[1:])
    text = compare.table({"a": [tmp_path / "a-seed1", tmp_path / "a-seed2"]})
    assert text.splitlines() == ["| | pass@1 | entropy |", "|---|---|---|", "| start | 0.30 +- 0.07 |  |",
                                 "| a | 0.60 +- 0.14 | 7.50 +- 0.00 |"]


# ------------------------------------------------- mutate -------------------------------------------------
CLIP = '''def clip(x, low):
    """Not below low + 1."""
    if x < low:
        return low
    return x + 1
'''


def changes(source: str) -> list[str]:
    return [f"{mutant.line}: {mutant.old} -> {mutant.new}" for mutant in mutate.mutants("clip.py", source)]


def test_mutants_of_five_lines_by_hand():
    assert sorted(changes(CLIP)) == sorted([
        "3: x < low -> (x <= low)", "3: x < low -> True", "3: x < low -> False",
        "4: return low -> return None", "4: return low -> return -low",
        "5: return x + 1 -> return None", "5: return x + 1 -> return -(x + 1)",
        "5: x + 1 -> (x - 1)", "5: 1 -> 0"])


@pytest.mark.parametrize("line,expected", [
    ("x = torch.min(a, b)", ["torch.min(a, b) -> (torch.max(a, b))"]),
    ("f(a, b)", ["f(a, b) -> (f(b, a))", "f(a, b) -> pass"]),
    ("x += a", ["x += a -> x -= a", "x += a -> pass"]),
    ("x = -a", ["-a -> (a)"]),
    ("x[0] = a", ["x[0] = a -> pass", "0 -> 1"]),
    ("x = x or a", ["x = x or a -> pass", "x or a -> (x and a)"]),
    ("x: int | None = 0.5", ["0.5 -> 1.0"]),
    ('x = f"{a + b}"', []), ('x = "text"', []), ("x = None", []),
    ("x = True", ["True -> False"]),
    ("x = [a for a in b if a]", ["a -> True", "a -> False"]),
    ("break", ["break -> continue"])])
def test_mutants_of_a_line(line, expected):
    found = changes(f"for i in b:\n    {line}\n")
    assert sorted(found) == sorted(f"2: {change}" for change in expected)


def test_only_method_and_loop_are_mutated():
    source = "A = 1\n# --- the method ---\nB = 2\nif __name__ == '__main__':\n    C = 3\n"
    assert changes(source) == ["3: 2 -> 3"]


def test_a_mutant_is_killed_one_survives_one_runs_too_long(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    source = CLIP + "\n\ndef wait(x):\n    while x:\n        x -= 1\n"
    (root / "clip.py").write_text(source)
    of_line = {str(mutant).split(":", 1)[1]: mutant for mutant in mutate.mutants("clip.py", source)}
    chosen = [of_line["5: 1  ->  0"], of_line["3: x < low  ->  (x <= low)"], of_line["10: x -= 1  ->  pass"]]
    tests = "python -c 'from {name} import clip, wait; wait(2); assert clip(3, 1) == 4'"
    results = mutate.run(chosen, {"clip.py": source}, root, tests, jobs=2, limit=4.0)
    found = {mutant.line: result for mutant, result, _ in results}
    assert found == {5: "killed", 3: "survived", 10: "timeout"}
    assert (root / "clip.py").read_text() == source
    with pytest.raises(ValueError, match="clip.py fails its tests unchanged"):
        list(mutate.run(chosen, {"clip.py": source}, root, "false", jobs=1, limit=0))


def test_results_are_kept_and_only_open_ones_tested_again(tmp_path, monkeypatch, capsys):
    (tmp_path / "clip.py").write_text(CLIP)
    out, tested = tmp_path / "results.jsonl", []

    def fake_run(todo, *rest):
        tested.append(len(todo))
        for mutant in todo:
            yield mutant, "survived" if mutant.line == 3 else "killed", 0.0

    monkeypatch.setattr(mutate, "run", fake_run)
    flags = ["mutate", "clip.py", "--root", str(tmp_path), "--out", str(out)]
    for further in ([], [], ["--again"], ["--tests", "true"], ["--sample", "4"]):
        monkeypatch.setattr(sys, "argv", flags + further)
        if len(tested) == 1:
            out.write_text(out.read_text() + '{"key": "half')
        mutate.main()
    # all nine; none; the three of line 3; other tests: all; a sample of what is known: none
    assert tested == [9, 0, 3, 9, 0]
    assert "clip.py                   9       6        0         3   66.7%" in capsys.readouterr().out
