"""Peak memory of one rank in one update, simulated: without a GPU, without weights.

    python -m tools.simulate_memory --shape qwen2.5-math-7b --ranks 8 --checkpointing

The project's own Policy runs on fake tensors (shapes and types, no numbers) over a fake process group of any
size: built, sharded, the reference scored, then, beside the gradients and moments of earlier
micro-batches, forward, backward, clipping and AdamW. All live storages are counted, so these peaks are exact
for the operations that run on a CPU. Not in them: the CUDA context, NCCL, fragmentation, what FSDP holds for
its other streams, and vLLM; engine/plan.py estimates those. tests/test_plan.py compares the two."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import os
import sys
import types
import weakref
from unittest import mock

import torch
import torch.distributed as dist
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from engine import fast, policy
from engine.policy import Rollout

GIB = 2 ** 30
SHAPES = {  # from config.json: type, hidden, inner, layers, heads, KV heads, head size, vocabulary, tied head
    "llama-3.2-1b": ("llama", 2048, 8192, 16, 32, 8, 64, 128256, True),
    "qwen2.5-math-1.5b": ("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, True),
    "qwen2.5-3b": ("qwen2", 2048, 11008, 36, 16, 2, 128, 151936, True),
    "qwen3-4b": ("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, True),
    "qwen2.5-math-7b": ("qwen2", 3584, 18944, 28, 28, 4, 128, 152064, False),
    "llama-3.1-8b": ("llama", 4096, 14336, 32, 32, 8, 128, 128256, False),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 128, 151936, False),
    "qwen2.5-32b": ("qwen2", 5120, 27648, 64, 40, 8, 128, 152064, False),
}


def config_of(shape: str | tuple, layers: int = 0):
    """The transformers config of a shape above, or of such numbers, cut to so many layers (0: all)."""
    kind, hidden, inner, depth, heads, kv_heads, head_size, vocabulary, tied = SHAPES.get(shape, shape)
    sizes = dict(hidden_size=hidden, intermediate_size=inner, vocab_size=vocabulary, tie_word_embeddings=tied,
                 num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=head_size)
    sizes |= dict(num_hidden_layers=layers or depth, max_position_embeddings=32768)
    return AutoConfig.for_model(kind, **sizes)


@dataclasses.dataclass
class Peaks:
    """Of one rank, in bytes."""
    live: dict[str, int]
    """After each phase: built, scoring, forward, backward, step."""
    peak: dict[str, int]
    """The most during each phase."""
    tokens: dict[str, int]
    """Of the micro-batch: computed (a shared prompt once), padded (rows x longest), responses."""


# ------------------------------------------------- counting -------------------------------------------------
class Ledger(TorchDispatchMode):
    """Counts the bytes of all live storages, and the most there were at once.

    explain: remembers who made each storage; mark() then prints what was live at the peak."""

    def __init__(self, fake: FakeTensorMode, explain: bool = False):
        super().__init__()
        self.fake, self.explain, self.paused = fake, explain, False
        self.sizes, self.makers, self.now = {}, {}, 0
        self.most, self.at_most = 0, []
        self.live, self.peak = {}, {}

    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        if any(kind is DTensor for kind in kinds):
            return NotImplemented
        if func is torch.ops._c10d_functional.wait_tensor.default:  # fake collectives are always done
            result = args[0]
        elif func is torch.ops.aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return True  # "if x.any()": fake tensors have no values, so take the branch of larger memory
        else:
            result = func(*args, **kwargs or {})
        if active_fake_mode() is self.fake and not self.paused:
            for tensor in tree_iter(result):
                if isinstance(tensor, torch.Tensor):
                    self.see(tensor, func)
        return result

    def see(self, tensor: torch.Tensor, maker) -> None:
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.sizes:
            weakref.finalize(storage, self.forget, key)
            self.makers[key] = f"{maker} {list(tensor.shape)} {caller()}" if self.explain else ""
        self.set_size(key, storage.nbytes())

    def set_size(self, key: int, size: int) -> None:
        self.now += size - self.sizes.get(key, 0)
        self.sizes[key] = size
        if self.now > self.most:
            self.most = self.now
            if self.explain:
                self.at_most = [(size, self.makers[key]) for key, size in self.sizes.items()]

    def forget(self, key: int) -> None:
        self.now -= self.sizes.pop(key, 0)

    def mark(self, phase: str) -> None:
        """This phase ends here."""
        self.live[phase], self.peak[phase] = self.now, self.most
        if self.explain:
            print(f"{phase}: live {self.now / GIB:.2f}, peak {self.most / GIB:.2f} GiB, of which")
            groups = {}
            for size, maker in self.at_most:
                groups.setdefault(maker, []).append(size)
            for maker in sorted(groups, key=lambda maker: -sum(groups[maker])):
                if sum(groups[maker]) > 2 ** 26:
                    print(f"  {sum(groups[maker]) / GIB:7.3f} in {len(groups[maker]):3}  {maker}")
        self.most, self.at_most = self.now, []


def caller() -> str:
    """The innermost line outside of torch: file:line."""
    frame = sys._getframe(3)
    while frame.f_back and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


@contextlib.contextmanager
def counting(ledger: Ledger):
    """What a dispatch mode does not see: FSDP frees gathered parameters by resizing storages. And what it
    should not: DTensor tries operations on fake tensors of full size to learn the shapes of their results."""
    resize, try_shapes = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

    def resize_counted(storage, size):
        resize(storage, size)
        if storage._cdata in ledger.sizes:
            ledger.set_size(storage._cdata, storage.nbytes())

    def try_uncounted(*args, **kwargs):
        paused, ledger.paused = ledger.paused, True
        try:
            return try_shapes(*args, **kwargs)
        finally:
            ledger.paused = paused

    with (mock.patch.object(torch.UntypedStorage, "resize_", resize_counted),
          mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", try_uncounted),
          ledger.fake, ledger):
        yield


# ------------------------------------------------ simulating ------------------------------------------------
@contextlib.contextmanager
def fake_ranks(ranks: int):
    """A process group in which only rank 0 exists. Its mesh is made here: making one takes real numbers."""
    with mock.patch.dict(os.environ, RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(ranks)):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", (ranks,))
            with mock.patch("torch.distributed.device_mesh.init_device_mesh", return_value=mesh):
                yield
        finally:
            dist.destroy_process_group()


def build(config, trainable: bool = True, checkpointing: bool = False, plain: bool = False) -> policy.Policy:
    """The project's Policy, bfloat16 compute, with a model made of the config instead of read from a folder.

    In its final type at once: assigning to parameter.data does not change a fake tensor's type."""
    def load(path, trust_remote_code=False):
        with no_init_weights():
            dtype = torch.float32 if trainable else torch.bfloat16
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.tie_weights()
        return model

    with (mock.patch.object(policy, "load_model", load),
          mock.patch.object(policy, "can_pack", return_value=True)):
        return policy.Policy("fake", torch.device("cpu"), torch.bfloat16, trainable, checkpointing,
                             plain=plain)


def simulate(config, ranks: int = 1, rows: int = 5, row_tokens: int = 3200, prompt_tokens: int = 150,
             checkpointing: bool = False, reference: bool = True, entropy: bool = False,
             plain: bool = False, explain: bool = False) -> Peaks:
    """One micro-batch on one of `ranks` ranks: `rows` responses to one prompt, `row_tokens` long with it.

    Gradients and moments exist from the start, as in all but the first micro-batch of the first update."""
    response = [5] * (row_tokens + 1 - prompt_tokens)  # its last token predicts nothing and is left out
    rollouts = [Rollout(list(range(prompt_tokens)), response, torch.zeros(0), True) for _ in range(rows)]
    micro = types.SimpleNamespace(rollouts=rollouts)
    tokens = dict(computed=prompt_tokens + rows * (row_tokens - prompt_tokens), padded=rows * row_tokens,
                  responses=rows * len(response))
    if plain:
        tokens["computed"] = tokens["padded"]
    gc.collect()
    gc.freeze()  # the collections below need not look at all that torch and transformers have made
    ledger = Ledger(FakeTensorMode(allow_non_fake_inputs=True), explain)
    cuda_chunks = mock.patch.dict(fast.LogProbs.ELEMENTS, cpu=fast.LogProbs.ELEMENTS["cuda"])
    cuda_rows = mock.patch.object(fast, "pack_split", fast.pack)
    with fake_ranks(ranks), cuda_chunks, cuda_rows, counting(ledger):
        ledger.paused = True  # here the model is made on the device; in truth it is read into host memory
        trained = build(config, checkpointing=checkpointing, plain=plain)
        frozen = build(config, trainable=False, plain=plain) if reference else None
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-6, fused=True)
        for parameter in trained.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        gc.collect()
        ledger.paused = False
        for tensor in existing_tensors(trained, optimizer, frozen):
            ledger.see(tensor, "made before")
        ledger.mark("built")
        if frozen:
            with torch.no_grad():
                frozen.logprobs(micro, 1.0)
        ledger.mark("scoring")
        logp, entropies = trained.logprobs(micro, 1.0)
        ledger.mark("forward")
        loss = (logp - logp.detach()).exp().sum()
        if entropy:
            loss = loss - 0.01 * entropies.sum()
        loss.backward()
        del logp, entropies, loss
        gc.collect()
        ledger.mark("backward")
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0, foreach=True)
        optimizer.step()
        ledger.mark("step")
    gc.unfreeze()
    return Peaks(ledger.live, ledger.peak, tokens)


def existing_tensors(trained, optimizer, frozen) -> list[torch.Tensor]:
    """Weights, gradients, moments and the reference."""
    weights = [*trained.parameters(), *(frozen.parameters() if frozen else [])]
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    return [t.detach() for t in weights] + [p.grad for p in trained.parameters()] + moments


def extrapolated(shape: str, **options) -> Peaks:
    """The peaks of the full depth, from simulations of three and of four layers: others cost the same.

    Two would be too few: with recomputation, the peak is where a layer's neighbours take memory, too."""
    depth = SHAPES[shape][3]
    three, four = simulate(config_of(shape, 3), **options), simulate(config_of(shape, 4), **options)

    def line(start: dict, end: dict) -> dict:
        return {phase: start[phase] + (depth - 3) * (end[phase] - start[phase]) for phase in start}

    return Peaks(line(three.live, four.live), line(three.peak, four.peak), three.tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-math-1.5b", choices=sorted(SHAPES))
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", type=int, default=5, help="responses in the micro-batch")
    parser.add_argument("--row_tokens", type=int, default=3200, help="tokens of a prompt with its response")
    parser.add_argument("--prompt_tokens", type=int, default=150)
    parser.add_argument("--layers", type=int, default=0, help="0: all of them")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations")
    parser.add_argument("--no_reference", action="store_true")
    parser.add_argument("--entropy", action="store_true", help="the loss has an entropy term")
    parser.add_argument("--explain", action="store_true", help="print what is live at the peak of a phase")
    args = parser.parse_args()
    torch.set_num_threads(1)
    peaks = simulate(config_of(args.shape, args.layers), args.ranks, args.rows, args.row_tokens,
                     args.prompt_tokens, checkpointing=args.checkpointing, reference=not args.no_reference,
                     entropy=args.entropy, explain=args.explain)
    print(f"{args.shape}, one of {args.ranks} rank(s), tokens: {peaks.tokens}")
    for phase, live in peaks.live.items():
        print(f"  {phase:10} live {live / GIB:7.2f} GiB, peak {peaks.peak[phase] / GIB:7.2f} GiB")


if __name__ == "__main__":
    main()
