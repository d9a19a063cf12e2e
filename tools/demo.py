"""`make demo`: ttrl.py trains the toy in runs/demo, then its report. Again, it goes on where it was stopped.

A run of other code than today's is no demo of it: then it stops, finished or not."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

RUN = Path("runs/demo")
AGAIN = f"nothing was trained; to train again: rm -r {RUN}"


def main() -> None:
    begun, done = (RUN / "run.json").exists(), False
    if begun:
        from engine.run_folder import code_digest, has_evaluation, read_metrics  # loading torch takes seconds
        if json.loads((RUN / "run.json").read_text(encoding="utf-8"))["code"] != code_digest(Path("ttrl.py")):
            sys.exit(f"ttrl.py, common.py, engine/, answers/ or toy/ changed since {RUN} began: {AGAIN}")
        done = (RUN / "final").exists() and has_evaluation(read_metrics(RUN)[-1])
    if done:
        print(f"The demo is done, {AGAIN}")
    else:
        words = ["ttrl.py", *["--resume"] * begun, "--out", str(RUN)]
        print("python", *words, flush=True)
        signal.signal(signal.SIGINT, lambda *_: None)  # Ctrl-C is the run's: it writes a checkpoint and ends
        os.environ["TO_CONTINUE"] = "run `make demo` again to continue"
        if code := subprocess.call([sys.executable, *words]):
            sys.exit(code if code != 130 else 0)  # Ctrl-C is no error, which make would tell
    subprocess.run([sys.executable, "-m", "tools.report", RUN], check=True)
    print("Open it: it shows the votes.")


if __name__ == "__main__":
    main()
