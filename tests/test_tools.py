"""tools.explain and tools.gpu_smoke in tiny; the lesson."""

import json
import os
import re
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
from conftest import ROOT

import common
import ettrl
import restrain
import scrl
import ttrl
from engine.run_folder import code_digest
from tools import demo, explain


@pytest.mark.slow
def test_gpu_smoke_without_a_gpu_fails_the_machine_alone():
    done = subprocess.run([sys.executable, "-m", "tools.gpu_smoke", "--full"], cwd=ROOT, text=True,
                          env=os.environ | dict(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
                          capture_output=True, timeout=1200)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    verdicts = re.findall(r"^(PASS|SKIP|FAIL) (.{22}) ", done.stdout, re.MULTILINE)
    failed = [name.strip() for verdict, name in verdicts if verdict == "FAIL"]
    assert len(verdicts) == 16 and failed == ["machine"], done.stdout


def test_the_demo_goes_on_and_stops_where_the_code_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    """Else it shows the numbers of other code as this code's."""
    monkeypatch.setattr("signal.signal", mock.Mock())
    (script := tmp_path / "ttrl.py").write_text("1")
    demo.RUN.mkdir(parents=True)
    (demo.RUN / "run.json").write_text(json.dumps(dict(code=code_digest(script))))
    with mock.patch("subprocess.call", return_value=130) as call, pytest.raises(SystemExit):
        demo.main()
    assert "--resume" in call.call_args.args[0]
    script.write_text("2")
    (demo.RUN / "final").mkdir()
    with pytest.raises(SystemExit, match="changed since"):
        demo.main()


def test_explain_shows_what_the_scripts_functions_give():
    answers, entropies = ["91", "91.0", "73", "73", "91", "38", None, "91"], [.2, .2, .3, .4, .3, .6, .7, .3]
    responses = [SimpleNamespace(text=f"so \\boxed{{{a}}}" if a else "hm", answer=a) for a in answers]
    vote = explain.Vote(common.Problem("What is 7 * 13?", "91"), responses, entropies)
    classes, columns = [0, 0, 1, 1, 0, 2, None, 0], explain.columns_of(vote)
    assert vote.classes == classes and vote.right == [c == 0 for c in classes]
    advantages = ttrl.group_advantages(ttrl.majority_reward(classes))
    assert columns["gold A"] == columns["TTRL A"] == advantages.tolist()
    assert columns["TTRL A"][:3] == pytest.approx([0.9354, 0.9354, -0.9354], abs=1e-4)  # 0.5 / 0.5345
    labels, strict = (0, {2}), scrl.Args()
    assert columns["SCRL R"] == scrl.scrl_rewards(classes, entropies, *labels, strict).tolist()
    plus, minus = restrain.restrain_advantages(classes, 3)
    assert (columns["RESTRAIN A+"], columns["RESTRAIN A-"]) == (plus.tolist(), minus.tolist())
    reshaped = ettrl.reshape_advantages(advantages, explain.torch.tensor(entropies))
    assert columns["ETTRL A"] == pytest.approx(reshaped.tolist(), rel=1e-6)


@pytest.mark.slow
def test_lesson_runs():
    """Every cell of docs/lesson.ipynb, and what it says of its outputs is true of those committed, too."""
    nbclient = pytest.importorskip("nbclient", reason="optional: no nbclient")
    pytest.importorskip("ipykernel", reason="optional: no ipykernel")
    import nbformat
    committed, lesson = (nbformat.read(ROOT / "docs/lesson.ipynb", as_version=4) for _ in range(2))
    place = dict(metadata=dict(path=str(ROOT / "docs")))
    nbclient.NotebookClient(lesson, timeout=120, kernel_name="python3", resources=place).execute()
    for cells in (committed.cells, lesson.cells):
        text = "".join(out.get("text", "") for cell in cells for out in cell.get("outputs", []))
        right, wrong, gold = re.findall(r"^(\d+): (\d+) votes, then (\d+)$", text, re.MULTILINE)
        assert all(int(after) > int(before) for _, before, after in (right, wrong))  # both majorities grew
        assert wrong[0] != gold[0] and int(gold[2]) < int(gold[1])
