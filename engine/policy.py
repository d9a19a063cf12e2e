"""The policy: a Hugging Face model under FSDP2 that gives the log-probs of responses, by micro-batches."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import os
import shutil
from itertools import count
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor

from engine.base import timed
from engine.ranks import all_gather, distributed, on_rank_0, print0, rank_and_ranks
from engine.logprobs import PackedHead, head_logprobs
from engine.models import trainers_way

# -------------------------------------------------- micro-batches -------------------------------------------
def plan_micro_batches(prompts: list[int], responses: list[int], groups: list[int], ranks: int, budget: int,
                       padding: float) -> list[list[list[int]]]:
    """Share responses out among the ranks; plan[rank][k] = indices of the rank's k-th micro-batch.

    prompts, responses: lengths in tokens; groups: numbers of the prompts. The size of a micro-batch: its
    prompts, once each, its responses, and `padding` times what would make those of a prompt equally long.
    None is larger than the budget, or than the longest sequence if that is larger still.

    FSDP makes the ranks wait for each other in every round. So there are as few rounds as possible, and each
    is dealt out evenly. A rank may get an empty list. Every rank computes the plan of all ranks, so nothing
    is communicated."""
    lengths = [prompt + response for prompt, response in zip(prompts, responses)]
    order = sorted(range(len(lengths)), key=lambda i: (groups[i], -responses[i]))
    budget, tokens = max(budget, *lengths), sum(lengths)
    for rounds in count(1):
        parts, done, plan = {}, 0, []
        for i in order:  # every round has as many tokens
            parts.setdefault(rounds * done // tokens, []).append(i)
            done += lengths[i]
        for part in parts.values():
            micros, sizes = balance_over_ranks(part, prompts, responses, groups, ranks, padding)
            plan.append(micros)
            if max(sizes) > budget:  # more rounds are needed; the other parts are not tried
                break
        else:
            return [list(micros) for micros in zip(*plan)]


def balance_over_ranks(part: list[int], prompts, responses, groups, ranks: int,
                       padding: float) -> tuple[list, list]:
    """(micro-batches, sizes) of a round: each response, the longest first, goes to the rank where it makes
    the smallest micro-batch."""
    micros, sizes = [[] for _ in range(ranks)], [0.0] * ranks
    longest = [{} for _ in range(ranks)]  # {prompt: length of the longest response that the rank has got}
    for i in sorted(part, key=lambda i: -responses[i]):
        new_sizes = []  # of each rank's micro-batch, if it got this response
        for size, longest_of in zip(sizes, longest):
            if groups[i] in longest_of:
                new_sizes.append(size + responses[i] + padding * (longest_of[groups[i]] - responses[i]))
            else:
                new_sizes.append(size + responses[i] + prompts[i])
        rank = new_sizes.index(min(new_sizes))
        sizes[rank] = new_sizes[rank]
        micros[rank].append(i)
        longest[rank].setdefault(groups[i], responses[i])
    return [sorted(micro, key=lambda i: groups[i]) for micro in micros], sizes


class MicroBatch:
    """Some responses of one optimizer step. Tensors [T] hold their response tokens, one after another."""

    def __init__(self, responses: list, indices: list[int], device):
        self.responses, self.indices, self.device = responses, indices, device
        self.sizes = [len(r.response_ids) for r in responses]
        self.length_T = self.per_token([max(r.length, 1) for r in responses])   # of the token's response
        masks = [torch.ones(len(r.response_ids)) if r.mask is None else r.mask for r in responses]
        self.mask_T = self.cat(masks)
        self.old_logp_T = self.cat([r.old_logp for r in responses])             # None: not scored
        self.ref_logp_T = self.cat([r.ref_logp for r in responses])             # None: no reference model

    @functools.cached_property
    def advantage_T(self) -> torch.Tensor:
        """[T] only here, in the update: check_batch has told by then of what is no number."""
        return self.per_token([r.advantage for r in self.responses])

    def per_token(self, values: list[float]) -> torch.Tensor:
        """[T] one number per response, repeated over its tokens."""
        values = torch.tensor(values, dtype=torch.float32, device=self.device)
        return values.repeat_interleave(torch.tensor(self.sizes, device=self.device))

    def cat(self, tensors: list[torch.Tensor | None]) -> torch.Tensor | None:
        """[T] one tensor per response, one after another; None if a response has none."""
        if any(tensor is None for tensor in tensors):
            return None
        return torch.cat(tensors).float().to(self.device)


class WithoutGradient(torch.autograd.Function):
    """Entropies that were computed without a gradient. A loss that needs one would be wrong in silence."""

    @staticmethod
    def forward(ctx, entropy_T, logp_T):  # logp_T: something that has a gradient
        return entropy_T.clone()

    @staticmethod
    def backward(ctx, grad_T):
        if grad_T.nan_to_num(0.0).any():  # of a NaN the log says more
            raise ValueError("the loss has an entropy term, but policy.logprobs was told the entropy_coef 0; "
                             "give it the weight of that term")
        return None, None


# ------------------------------------------------------ the policy ------------------------------------------
class Policy:
    """A causal language model. Trainable: float32 master weights; else, as reference, the compute type's.

    Sharded with FSDP2 if there are ranks or a GPU. `plain` takes padded rows and full logits. `offload`: the
    shards, their gradients and the optimizer's state live in host memory."""

    def __init__(self, model, device, dtype, trainable: bool = True, gradient_checkpointing: bool = False,
                 micro_tokens: int = 16384, plain: bool = False, max_length: int = 0, offload: bool = False,
                 implementation: tuple[type, str] | None = None, adapt=None):
        """model: of load_model, and this policy's alone. max_length: of prompt and response, in tokens.
        implementation: (head, attention), of `trainers_way` if not given. adapt: see common.start."""
        self.device, self.dtype, self.trainable, self.micro_tokens = device, dtype, trainable, micro_tokens
        self.rank, self.ranks = rank_and_ranks()
        self.model = model
        model.eval()  # dropout would make the sampler and the trainer two different policies
        self.implementation = implementation or trainers_way(model, plain, max_length)
        head, attention = self.implementation
        self.packed = head is PackedHead
        model.set_attn_implementation(attention)
        self.head = head(model).eval()
        if trainable and gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            for module in model.modules():
                if getattr(module, "gradient_checkpointing", False):
                    # transformers recomputes only in training mode; dropout must stay off
                    module.training = True
                    vars(module).update({name: 0.0 for name in vars(module) if "drop" in name})
        if adapt:
            adapt(self)
        self._shard(offload)

    def _shard(self, offload: bool) -> None:
        """Every decoder layer is one FSDP group; embeddings, norm and (tied) head are the last. Until a group
        is sharded it is the memory-mapped file; only then are the shards cast, so that a rank never holds
        more than its shards in host memory."""
        stored = torch.float32 if self.trainable else self.dtype
        if not distributed():
            for parameter in self.parameters():
                parameter.data = parameter.data.to(stored)
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
        mesh = init_device_mesh(self.device.type, (self.ranks,))
        if offload and self.trainable and "LOCAL_WORLD_SIZE" in os.environ:
            # AdamW runs on the CPU, and torchrun has given every rank one thread
            cores = len(os.sched_getaffinity(0))
            torch.set_num_threads(max(1, cores // int(os.environ["LOCAL_WORLD_SIZE"])))
        options = dict(mesh=mesh, offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
                       mp_policy=MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32))
        for group in [*decoder_layers(self.model), self.head]:
            fully_shard(group, **options)
            group.set_gradient_divide_factor(1.0)  # the ranks' losses add up: so do their gradients
            group.set_force_sum_reduction_for_comms(True)

        # buffers keep their type; FSDP takes note of what _apply does
        self.head._apply(lambda tensor: tensor.to(stored) if isinstance(tensor, DTensor) else tensor)

    def parameters(self):
        return self.model.parameters()

    def logprobs(self, micro: MicroBatch, temperature: float, entropy_coef: float = 1.0,
                 statistics=()) -> tuple[torch.Tensor, ...]:
        """(log-probs of the response tokens, entropies over the whole vocabulary in nats), both [T].

        The distribution is that of logits / temperature, which was sampled from. A log-prob is 0 where the
        mask is 0. Statistics follow, see `score`. entropy_coef: if 0, the entropies are without a gradient,
        and a loss that has one of them all the same is a ValueError."""
        logp_T, entropy_T, *others = head_logprobs(
            self.head, micro.responses, self.device, temperature, statistics, bool(entropy_coef))
        if not entropy_coef:
            entropy_T = WithoutGradient.apply(entropy_T, logp_T)
        # Tokens with mask 0 were not sampled: exp(log-prob - 0) could be inf, and inf * 0 in the loss is NaN.
        return logp_T.masked_fill(micro.mask_T == 0, 0.0), entropy_T, *others

    def micro_batches(self, minibatch: list, has_gradient=None):
        """This rank's micro-batches, of at most micro_tokens each; equally many on every rank. has_gradient:
        a function of a response; those for which it is False are left out."""
        if not minibatch:
            return
        # A rank with nothing left computes the shortest sequence once more, with weight zero: FSDP needs all
        # ranks, and the optimizer a gradient, if only of zeros.
        filler = copy.copy(min(minibatch, key=lambda r: len(r.prompt_ids) + len(r.response_ids)))
        filler.mask = filler.old_logp = filler.ref_logp = torch.zeros(len(filler.response_ids))
        responses = list(filter(has_gradient, minibatch)) or [filler]
        lengths = [len(r.prompt_ids) + len(r.response_ids) for r in responses]
        nothing, number = [0] * len(responses), {}  # number: of each prompt
        # padded rows: as if there were no prompts, but responses of the whole length
        sizes, padding = (nothing, lengths, nothing), 1.0
        if self.packed:
            # a prompt is computed once; attention alone sees padding, which counts as an eighth of a token
            groups = [number.setdefault(tuple(r.prompt_ids), len(number)) for r in responses]
            own = [len(r.response_ids) for r in responses]
            sizes, padding = ([len(r.prompt_ids) for r in responses], own, groups), 1 / 8
        for indices in plan_micro_batches(*sizes, self.ranks, self.micro_tokens, padding)[self.rank]:
            yield MicroBatch([responses[i] for i in indices] or [filler], indices, self.device)

    def score_old(self, responses: list, temperature: float, has_gradient=None) -> None:
        """Set old_logp and entropy, [T] each: of the policy as it is now, which sampled them. has_gradient: a
        function of a response; those for which it is False get none."""
        responses = list(filter(has_gradient, responses))
        for response, (logp_T, entropy_T) in zip(responses, self.score(responses, temperature)):
            response.old_logp, response.entropy = logp_T, entropy_T

    def score_ref(self, responses: list, temperature: float) -> None:
        """Set ref_logp [T]: of the frozen base model."""
        for response, (logp_T, _) in zip(responses, self.score(responses, temperature)):
            response.ref_logp = logp_T

    @timed("score")
    @torch.no_grad()
    def score(self, responses: list, temperature: float, *statistics) -> list[tuple]:
        """(log-probs, entropies in nats, statistics ...) of every response, [T] each; the ranks share them.

        A statistic is a function: of log-probs of the whole vocabulary [rows, V], a chunk of rows at a time,
        it makes numbers [rows]."""
        same_responses(responses)
        mine, scores = [], {}
        for micro in self.micro_batches(responses):
            values = torch.stack(self.logprobs(micro, temperature, 0, statistics)).cpu()
            mine.append((micro.indices, micro.sizes, values))  # whole: a view would be sent with its storage
        if hasattr(self.head, "reshard"):  # sharded
            self.head.reshard()  # else the root stays gathered, in the compute type, until a backward pass
        for indices, sizes, values in sum(all_gather(mine), []):
            for i, of_response in zip(indices, values.split(sizes, 1)):
                scores[i] = tuple(of_response)
        return [scores[i] for i in range(len(responses))]

    def named_tensors(self):
        """(name, full tensor in the compute type) of every parameter, a tied one once. A collective: the
        ranks give each other their shards, after the cast."""
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach().to(self.device, self.dtype)
            tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            yield name, tensor

    def save(self, folder: Path, tokenizer) -> None:
        """Write the model in Hugging Face format, in the compute type, to one side, and rename it.

        Raises UserError, on all ranks, if it cannot be written."""
        state, stored = {}, self.model.state_dict()
        for name, tensor in self.named_tensors():  # rank 0 collects them in host memory
            if self.rank == 0:
                state[name] = tensor.cpu()
        state |= {name: buffer.cpu() for name, buffer in self.model.named_buffers() if name in stored}
        # no loss shows it: the last step's update may have overflowed
        if damaged := [name for name, tensor in state.items() if not tensor.isfinite().all()]:
            print0(f"Warning: the final model holds NaN or infinite weights, as in {damaged[0]}.")
        on_rank_0(lambda: self._write(folder, tokenizer, state))

    def _write(self, folder: Path, tokenizer, state: dict[str, torch.Tensor]) -> None:
        partial = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        self.model.save_pretrained(partial, state_dict=state)
        own = partial / "generation_config.json"
        own.unlink(missing_ok=True)
        if self.model.own_generation_config is not None:
            own.write_bytes(self.model.own_generation_config)
        self.model.config.dtype = self.dtype  # transformers names that of the masters
        self.model.config.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)


def load_policies(models: list, device, dtype, machine, max_length: int,
                  adapt=None) -> tuple[Policy, Policy | None]:
    """(the policy, the reference) of one model that was loaded twice; loaded once, there is no reference."""
    recompute = machine.gradient_checkpointing == "on"
    if machine.gradient_checkpointing == "auto":
        recompute = device.type == "cuda"  # where memory is short; with some to spare "off" is faster
    options = dict(plain=machine.plain, max_length=max_length, gradient_checkpointing=recompute,
                   micro_tokens=machine.micro_tokens)
    policy = Policy(models[0], device, dtype, offload=machine.offload == "optimizer", adapt=adapt, **options)
    if len(models) < 2:
        return policy, None
    reference = Policy(models[1], device, dtype, False, offload=machine.offload != "none",
                       implementation=policy.implementation, **options)
    return policy, reference


def decoder_layers(model) -> list:
    """The modules that transformers keeps whole on a device."""
    return [module for module in model.modules() if type(module).__name__ in model._no_split_modules]


# ------------------------------------------------ what ranks must share -------------------------------------
DIFFERENT = ("the ranks have different {}: every rank must compute the same, from all responses, without its "
             "rank, process id, clock or own random numbers")


def same_responses(responses: list) -> None:
    """Raises ValueError, on all ranks, if one of them has other responses."""
    ids = hashlib.blake2b(repr([r.response_ids for r in responses]).encode()).digest()
    if len(set(all_gather(ids))) > 1:
        raise ValueError(DIFFERENT.format("responses to score or train"))


def check_batch(train: list) -> None:
    """Raises ValueError if a response has no finite advantage, or if the ranks have different batches."""
    for advantage in [response.advantage for response in train]:
        if not isinstance(advantage, (int, float)) or not math.isfinite(advantage):
            raise ValueError(f"a response has the advantage {advantage!r}; set response.advantage to a "
                             "finite number for all that is trained (of a tensor: .tolist())")
    same_responses(train)
    advantages = torch.tensor([r.advantage for r in train])
    if not all(torch.allclose(advantages, others, rtol=1e-4) for others in all_gather(advantages)):
        raise ValueError(DIFFERENT.format("advantages"))
