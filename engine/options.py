"""Options: their allowed ranges, those that no paper sets, and the command line.

The options that a paper sets are in common.py, a method's own in its script."""

from __future__ import annotations

import dataclasses
import os
import sys
from functools import partial
from importlib import util
from inspect import get_annotations
from pathlib import Path
from typing import Annotated, Literal

import docstring_parser
import torch
import tyro
from pydantic import Field, TypeAdapter, ValidationError
from tyro.constructors import PrimitiveConstructorSpec

from engine.base import UserError
from engine.ranks import print0, rank_and_ranks
from engine.run_folder import read_run, script_name

# ------------------------------------------------------- ranges ---------------------------------------------
# pydantic checks them, so that a bad value is one sentence before anything is loaded.
Count = Annotated[int, Field(ge=1, le=2**62)]
CountOrZero = Annotated[int, Field(ge=0, le=2**62)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NonNegativeOrInf = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
PositiveShare = Annotated[float, Field(gt=0, le=1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


def at_home(texts: list[str]) -> str:
    """A path, or several behind commas, with ~ as the home folder: a shell leaves it in --out=~/run."""
    return ",".join(map(os.path.expanduser, texts[0].split(",")))


# A path, or a name that may be one.
Place = Annotated[str, PrimitiveConstructorSpec(1, "STR", at_home, lambda value: isinstance(value, str),
                                                lambda value: [value])]


# ----------------------------------------------- options that no paper sets --------------------------------
# A new option is one field: its docstring is the help, its type the range. The command line, run.json,
# and --resume then know it. What may have to know of it as well: bad_flags and parse_resumed below.
@dataclasses.dataclass
class Shared:
    """Options of the six scripts and of evaluate.py."""
    template_vars: str = ""
    """Variables of the model's chat template, as a JSON object such as '{"enable_thinking": false}'. For
    today's date a template gets 26 July 2024, so that prompts stay the same."""
    question_field: str = ""
    """Column of the question; empty: found from a list of usual names."""
    answer_field: str = ""
    """Column of the gold answer, which is for evaluation and the log alone; empty: found from a list, too."""
    show_prompt: bool = False
    """Print the exact text of each data set's first prompt, and of z_0 (Dynamic RL), and exit."""
    sampler: Literal["auto", "vllm", "hf"] = "auto"
    """Sampling engine. auto: vLLM if it is installed, else transformers (hf), as with --plain."""
    gpu_memory: PositiveShare = 0.5
    """Share of each GPU's memory that vLLM may take while it samples (it sleeps during the update)."""
    tensor_parallel: Count = 1
    """Number of consecutive ranks that share a vLLM engine, for a model that one GPU cannot hold."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute type; auto: bfloat16 on a GPU, float32 on a CPU. Master weights are always float32."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; give this only if you trust its author."""
    out: Place = ""
    """Run folder; empty: runs/<script>-<time>-<process>."""


@dataclasses.dataclass
class Machine(Shared):
    plain: bool = False
    """Compute in the slow and obvious way, with padded rows and full logits. It gives the same step."""
    gradient_checkpointing: Literal["auto", "on", "off"] = "auto"
    """Compute activations again in the backward pass, which takes a quarter of the memory and a third more
    time. auto: on a GPU."""
    micro_tokens: Count = 8192
    """Largest number of tokens in a micro-batch: a matter of memory, not of results."""
    offload: Literal["none", "reference", "optimizer"] = "none"
    """What is kept in host memory instead of the GPU's. reference: the reference model. optimizer: also the
    policy's weights, gradients and AdamW's state. It ran two steps on one GPU."""
    eval_start: bool = True
    """Evaluate the base model before the first step."""
    resume: bool = False
    """Continue from the newest checkpoint in --out, on any number of ranks."""
    checkpoint_every: CountOrZero = 20
    """Steps between checkpoints. One is also written before an evaluation, and after a step in which Ctrl-C,
    SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 came (torchrun waits for 30 s: see its --shutdown-timeout). 0: only
    after such a signal."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints that are kept."""
    log_texts: CountOrZero = 2
    """Number of prompts of each step whose responses samples.jsonl keeps, with the ends of their texts."""
    wandb: bool = False
    """Send the curves to Weights & Biases, too (needs `pip install wandb`)."""

    @property
    def uses_vllm(self) -> bool:
        """What --sampler means here."""
        return self.sampler == "vllm" or self.sampler == "auto" and not self.plain and has_vllm()


def has_vllm() -> bool:
    """Whether vLLM is installed."""
    # it is not imported: a broken install shows its traceback, and is not replaced by --sampler hf in silence
    return util.find_spec("vllm") is not None


def options_dict(args) -> dict:
    """All options by name, the machine's among them."""
    own = {name: value for name, value in vars(args).items() if name != "machine"}
    return own | (vars(args.machine) if "machine" in vars(args) else {})


def make_args(args_class: type, values: dict):
    """Arguments with these values by name, the machine's among them, and defaults for the others."""
    # run.json and the toy's defaults know all options by name alone; here they part again
    machine = {name: value for name, value in values.items() if name in Machine.__dataclass_fields__}
    own = {name: value for name, value in values.items() if name not in machine}
    return args_class(**own, machine=Machine(**machine)) if machine else args_class(**own)


def out_of_range(args) -> list[str]:
    """One sentence per option whose value is not of its type or outside its range."""
    try:
        values = {name: vars(v) if isinstance(v, Machine) else v for name, v in vars(args).items()}
        TypeAdapter(type(args)).validate_python(values)
    except ValidationError as error:
        bad = []
        for e in error.errors():
            # pydantic writes "Input should be greater than 0"; behind the flag and its value it is a sentence
            name = e["loc"][1 if e["loc"][0] == "machine" else 0]
            bad.append(f"--{name} is {e['input']!r}, but {e['msg'].replace('Input should', 'must')}.")
        return bad
    return []


def bad_flags(args) -> list[str]:
    """One sentence per bad flag: flag, value, what is allowed."""
    if bad := out_of_range(args):
        return bad  # what follows computes with the values
    machine, ranks = args.machine, rank_and_ranks()[1]
    responses, parallel = args.responses_per_prompt(), machine.tensor_parallel
    # all that is wrong is told at once, so that three bad flags do not take three starts
    table = [  # (what is wrong, sentence)
        (responses < 2,
         f"the responses per prompt are {responses}, but must be at least 2: an advantage compares them."),
        (responses >= 2 and not args.MIN_TRAIN_SAMPLES <= args.train_samples <= responses,
         f"--train_samples is {args.train_samples}, but must be at least {args.MIN_TRAIN_SAMPLES} and at "
         f"most {responses}, the responses per prompt."),
        (ranks % parallel,
         f"--tensor_parallel is {parallel}, but must divide the number of ranks, {ranks}."),
        (parallel > 1 and not machine.uses_vllm,  # the ranks of an engine would each sample the same
         f"--tensor_parallel is {parallel}, but only vLLM splits a model among ranks; give --sampler vllm.")]
    return [sentence for wrong, sentence in table if wrong]


# ----------------------------------------- options of the built-in models ----------------------------------
# A script's last lines add what suits its own method's options.
ROOT = Path(__file__).parent.parent
TOY_MODEL = str(ROOT / "toy")
# --model: the two toys have the same problems and options (toy/README.md)
TOYS = {"": TOY_MODEL, "toy": TOY_MODEL, "toy_even": str(ROOT / "toy/even")}
SMOLLM2_MODEL = str(ROOT / "smollm2")
# Without --model: the toy, a thousand times smaller than the papers' models, so with a larger learning rate.
TOY = dict(dataset="toy", eval="toy_test", steps=60, eval_every=20, eval_samples=2, checkpoint_every=10,
           sampler="hf", prompts_per_batch=16, votes=16, train_samples=8, max_prompt_tokens=128,
           max_new_tokens=128, micro_tokens=4096, lr=2e-4, num_minibatches=2, eval_temperature=1.0,
           eval_top_p=1.0, eval_greedy=True, log_texts=1000)  # all of a step's prompts
# --model smollm2, a real pretrained model that toy/make_smollm2.py makes: these beside the toy's.
SMOLLM2 = dict(
    dataset="smollm2", eval="smollm2_test,smollm2_ood", prompt="examples/prompts/few_shot.txt",
    max_prompt_tokens=192, max_new_tokens=40, prompts_per_batch=8, votes=16, train_samples=8, steps=16,
    eval_every=0, eval_samples=2, checkpoint_every=4, lr=1e-5, micro_tokens=768,
    # a processor that multiplies matrices in bfloat16 does so seven times as fast as in float32
    dtype="bfloat16" if torch.cpu.get_capabilities().get("amx_bf16") else "auto",
    num_minibatches=1, kl_coef=0.0)


# ---------------------------------------------------- command line ------------------------------------------
def parse(args_class: type, toy: dict = TOY, smollm2: dict = SMOLLM2):
    """Command line -> args. Defaults: the toy's without --model, the toy's and smollm2's with that model,
    with --resume those of the run that is resumed."""
    sys.stdout.reconfigure(errors="backslashreplace")  # where a terminal knows ASCII alone
    document(args_class)
    # The first reading tells which model, and so which defaults; --help ends in it, with the paper's values.
    read = partial(tyro.cli, args_class, description=describe(sys.modules[args_class.__module__]),
                   use_underscores=True)
    args = read()
    if options_dict(args).get("resume"):
        return parse_resumed(read, args_class, args)
    if overrides := defaults_of(args.model, toy, smollm2):
        args = read(default=make_args(args_class, overrides))
        which = f"--model {args.model} runs" if args.model else "No --model given: this runs the built-in toy"
        options = options_dict(args)
        flags = " ".join(f"--{name} {value}" for name, value in overrides.items() if options[name] == value)
        print0(f"{which} with these overrides of the paper's values:\n  {flags}")
    return args


def defaults_of(model: str, toy: dict = TOY, smollm2: dict = SMOLLM2) -> dict:
    """What replaces the paper's values for a built-in model; for all others nothing."""
    if model in TOYS:
        return toy
    if model == "smollm2":
        return toy | smollm2
    return {}


def document(args_class: type) -> None:
    """For --help: a class's own options before those that it inherits, and each docstring as one line; tyro
    would keep the line ends of the source."""
    for owner in (*args_class.__mro__[:-1], *Machine.__mro__[:-1]):
        fields = owner.__dataclass_fields__
        for option in docstring_parser.parse_from_object(owner).params:
            if option.arg_name in fields and option.description:
                fields[option.arg_name].metadata = dict(help=" ".join(option.description.split()))
    fields = args_class.__dataclass_fields__
    args_class.__dataclass_fields__ = {name: fields[name] for name in get_annotations(args_class)} | fields


def describe(module) -> str:
    """What --help says of a script: the first paragraph of its docstring, and where the rest is."""
    first = " ".join(module.__doc__.partition("\n\n")[0].split())
    return f"{first}\n(What it computes, and commands: the top of {Path(module.__file__).name}.)"


def parse_resumed(read, args_class: type, args):
    """The arguments of the run in --out. A flag of the command line wins over them, and is printed.

    read: reads the command line, with other defaults if they are given."""
    folder = Path(args.machine.out)
    if not (folder / "run.json").is_file():
        raise UserError(f"--resume needs --out, the folder of a run, and there is no {folder / 'run.json'}.")
    run = read_run(folder)
    if run["script"] != script_name():
        raise UserError(f"--resume: {args.machine.out} is a run of {run['script']}.py.")
    # options that the script no longer has are dropped, new ones have their defaults
    names = args_class.__dataclass_fields__.keys() | Machine.__dataclass_fields__.keys()
    recorded = {name: value for name, value in run["args"].items() if name in names}
    # What a stranger's run.json must not decide: which code runs. A new option that names a path to write to
    # belongs here, too; --out itself is the folder that was given.
    recorded["trust_remote_code"] = False
    args = read(default=make_args(args_class, recorded))
    defaults = options_dict(args_class())  # a script may have got options since the run began
    for name, value in options_dict(args).items():
        was = recorded.get(name, defaults[name])
        if value == was or name in ("resume", "out", "trust_remote_code"):
            continue
        if name in ("seed", "prompts_per_batch"):  # the problems of a batch derive from them and its number
            raise UserError(f"--{name} is {value}, but the run in {args.machine.out} has {was}; start a new "
                            "run.")
        print0(f"Resuming with another --{name}: {value} (was {was})")
    return args
