"""How a script's processes start, stop at a signal, and end.

What is saved when a signal came is run.py's business."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record
from torch.distributed.elastic.utils.distributed import get_free_port

from engine.base import UserError
from engine.options import SMOLLM2, TOY, parse
from engine.ranks import all_gather, distributed, from_torchrun, print0, rank_and_ranks


def start_processes(compute: str, train: bool = True) -> tuple[torch.device, torch.dtype]:
    """This process's device, and its compute type. Opens the process group if there are ranks or a GPU, or to
    train in bfloat16: it is FSDP that computes so on float32 weights.

    compute: as --dtype."""
    cuda, ranks = torch.cuda.is_available(), rank_and_ranks()[1]
    bf16 = compute == "bfloat16" or compute == "auto" and cuda
    device = torch.device("cuda", from_torchrun("LOCAL_RANK", 0)) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if (ranks > 1 or cuda or bf16 and train) and not dist.is_initialized():
        if ranks == 1 and not os.environ.get("RANK"):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(get_free_port()), RANK="0",
                              LOCAL_RANK="0", WORLD_SIZE="1")
        # a rank may wait for another that samples or scores longer responses, some minutes as a rule
        timeout = timedelta(seconds=from_torchrun("GLOO_TIMEOUT_SECONDS", 3600))
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timeout,
                                device_id=device if cuda else None)
        if cuda:  # those waits are gloo's; who waits in NCCL for half an hour waits for a rank that is gone
            dist.group.WORLD._get_backend(device)._set_default_timeout(timedelta(minutes=30))
    return device, torch.bfloat16 if bf16 else torch.float32


def tune() -> None:
    """What Linux is told of this process."""
    libc = ctypes.CDLL(None)
    if os.environ.get("RANK"):
        # PR_SET_PDEATHSIG: torchrun dies at a signal that it was not told of, as USR1, and leaves its ranks
        libc.prctl(1, signal.SIGTERM)
    if hasattr(libc, "mallopt") and not torch.cuda.is_available():
        # glibc returns the memory of big tensors and gets it anew, page by page: a sixth of SmolLM2's step
        libc.mallopt(-4, 0)   # M_MMAP_MAX: no big tensor gets a mapping of its own
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: freed memory is kept


# where a task finds its number, and that of all; MPI's come first: their tasks may inherit a Slurm job's
TASKS = dict(OMPI_COMM_WORLD_RANK="OMPI_COMM_WORLD_SIZE", PMI_RANK="PMI_SIZE", SLURM_PROCID="SLURM_NTASKS")


def warn_of_tasks() -> None:
    """Else each of several tasks makes a run of its own, on the same GPU perhaps, in silence."""
    number = next(filter(os.environ.get, TASKS), "")
    tasks = from_torchrun(TASKS.get(number, ""), 1)
    if tasks > 1 and os.environ[number] == "0" and not os.environ.get("WORLD_SIZE"):
        print0(f"Warning: this is one of {tasks} tasks of Slurm or MPI, and torchrun did not start it: each "
               "is a run of its own. Give a node one task that starts torchrun, as examples/slurm.sh does.")


@record  # torchrun shows the traceback of the first rank that fails
def launch(main, args_class: type, toy: dict = TOY, smollm2: dict = SMOLLM2) -> None:
    """Run a script's main. toy: its defaults without --model; smollm2: beside them, with that model.

    Bad input (UserError) ends with one sentence and exit code 2, a bug with its traceback."""
    rank, _ = rank_and_ranks()
    if sys.platform == "linux":
        tune()
    warn_of_tasks()
    try:
        main(parse(args_class, toy, smollm2))
    except SystemExit as stop:
        # a stop by a signal, which is clean; but vLLM, torn down by Python, prints an error of CUDA
        if "vllm" in sys.modules and isinstance(stop.code, int):
            leave(stop.code)
        raise
    except UserError as error:
        if rank:  # most errors are every rank's: rank 0 prints it, and torchrun ends the others
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"Error{f' on rank {rank}' if rank else ''}: {error}", file=sys.stderr, flush=True)
        leave(2)
    except Exception as error:
        if "Timed out waiting" in str(error):  # gloo's words
            error.add_note("GLOO_TIMEOUT_SECONDS is how long a rank waits for another, 3,600 by default.")
        get_error_handler().record_exception(error)  # for torchrun
        logging.exception("An error:")
        leave(1)  # Python's own exit would free the memory of a sleeping vLLM, which may hang or crash
    if distributed():
        # Exit together: a rank that is torn down while another is still in a collective can crash it.
        all_gather(None)
        if "vllm" not in sys.modules:  # its groups, graphs and memory pools are left to the system
            dist.destroy_process_group()
        leave(0)


def leave(code: int) -> None:
    """Exit without unwinding: a rank that failed alone must not wait in a collective for the others."""
    if "wandb" in sys.modules:  # it would call a run that ends so "running"
        sys.modules["wandb"].finish(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class StopSignal:
    """The number of the signal that came (Ctrl-C: SIGINT), 0 before. The loop obeys it when a step is saved.

    In an evaluation, when all steps are saved, it ends the process at once. Further signals change nothing:
    Slurm signals every process of a job, and torchrun passes on its own, so one stop may come twice."""
    # the end of a Slurm job, Ctrl-C, what Slurm's --signal and submitit send before it, a closed terminal
    NUMBERS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)

    def __init__(self, run_folder: Path, saved: int):
        """saved: the step of the newest checkpoint, 0 before the first."""
        # idle: nothing would be lost now (see at_once)
        self.saved, self.number, self.idle = saved, 0, False
        # `make demo` has an advice of its own
        self.advice = os.environ.get("TO_CONTINUE") or f"continue with --resume --out {run_folder}"

    def listen(self) -> None:
        """From now on a signal waits for the end of a step. nohup's ignored SIGHUP stays ignored."""
        for number in self.NUMBERS:
            # a shell ignores Ctrl-C, too, for what it starts in the background
            if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, self)

    def __call__(self, number, frame) -> None:
        first, name = not self.number, signal.Signals(number).name
        self.number = self.number or number
        text = f"{name}: finishing this step, then writing a checkpoint (Ctrl-\\: leave at once)"
        if self.idle:
            text = f"Stopped by {name}; {self.advice}"
        if (first or self.idle) and rank_and_ranks()[0] == 0:
            # no print(): the signal may have interrupted one, which cannot be entered twice
            os.write(2, f"\n{text}\n".encode())
        if self.idle:
            leave(128 + number)

    @contextlib.contextmanager
    def at_once(self, step: int):
        """While this lasts, a signal ends the process at once, if the checkpoint of this step is written."""
        self.idle = step == self.saved
        if self.idle and self.number:  # it came since the loop last looked
            self(self.number, None)
        yield
        self.idle = False
