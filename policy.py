"""The policy: log-probs without full logits, micro-batches over ranks, FSDP2, one optimizer step."""

from __future__ import annotations

import math
import os
import shutil
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import AttentionInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from problems import UserError
from samplers import Rollout


def plan_micro_batches(lengths: list[int], ranks: int, budget: int, groups: list[int] | None = None) -> list[list[list[int]]]:
    """Cut sequences of these lengths into micro-batches; plan[rank][k] = indices of rank's k-th micro-batch.

    Sorted by group (if given) and length, so that little is padding; padded size (longest x count) within the token budget
    where one sequence allows it. Every rank gets equally many (an empty list where there is nothing left), because FSDP hangs
    where ranks disagree. Every rank computes the plan of all ranks from the same lengths: no communication."""
    order = sorted(range(len(lengths)), key=lambda i: (groups[i] if groups else 0, -lengths[i]))
    micros = []
    for i in order:
        if micros and max(lengths[j] for j in [*micros[-1], i]) * (len(micros[-1]) + 1) <= budget:
            micros[-1].append(i)
        else:
            micros.append([i])
    while len(micros) < ranks and any(len(m) > 1 for m in micros):  # fewer micro-batches than ranks: halve the largest
        largest = max(micros, key=lambda m: max(lengths[i] for i in m) * len(m))
        largest = largest if len(largest) > 1 else max(micros, key=len)
        micros.remove(largest)
        micros += [largest[:len(largest) // 2], largest[len(largest) // 2:]]
    if groups:  # ranks wait for each other: those who take turns should have as much to do
        micros.sort(key=lambda m: -sum(lengths[i] for i in m))
    micros += [[] for _ in range(-len(micros) % ranks)]
    return [micros[rank::ranks] for rank in range(ranks)]


class MicroBatch:
    """Some rollouts of one optimizer step. All tensors are 1-D over their response tokens, one response after another."""

    def __init__(self, rollouts: list[Rollout], weights: list[float], device):
        self.rollouts, self.device = rollouts, device
        self.lengths = torch.tensor([len(r.response_ids) for r in rollouts], device=device)
        self.weights = self._spread(weights)
        """Loss weight of each token; sums to 1 over the whole optimizer step, all micro-batches and ranks."""
        self.old_logprobs = self.concat("old_logprobs")
        self.ref_logprobs = self.concat("ref_logprobs")
        self.advantages = self.expand("advantage")
        self.tis: torch.Tensor | float = 1.0

    def _spread(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).repeat_interleave(self.lengths)

    def expand(self, name: str) -> torch.Tensor:
        """[tokens] a number of each rollout, repeated over its response tokens."""
        return self._spread([float(getattr(r, name)) for r in self.rollouts])

    def concat(self, name: str) -> torch.Tensor | None:
        """[tokens] a per-token tensor of each rollout; None where a rollout has none."""
        parts = [getattr(r, name) for r in self.rollouts]
        return None if not parts or any(p is None for p in parts) else torch.cat(parts).float().to(self.device)


def packed_attention(module, query, key, value, attention_mask, unpack=None, pack=None, **options):
    """Attention of rows that lie in one row of tokens (`--attention packed`): all the rest of the model then computes no
    padding and every prompt once for all its responses. [1, heads, tokens, d] -> [1, tokens, heads, d].

    unpack [rows, longest] says which token stands where in a row, pack [tokens] where a token stands among the rows. Padding
    is on the right, so causal attention never sees it and needs no mask. Without them this is ordinary causal attention."""
    if unpack is None:
        return sdpa_attention_forward(module, query, key, value, None, **options)
    take = torch.nn.functional.embedding  # indexing with a fast gradient
    query, key, value = (take(unpack, x[0].transpose(0, 1).flatten(1)).unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
                         for x in (query, key, value))
    out, _ = sdpa_attention_forward(module, query, key, value, None, **options)
    return take(pack[None], out.flatten(0, 1).flatten(1)).unflatten(-1, out.shape[2:]), None


AttentionInterface.register("packed", packed_attention)


class _Head(torch.nn.Module):
    """The model with its head applied to response positions only, chunk by chunk (see _LogProbs)."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, index, targets, temperature, entropy_grad=False, full=False):
        if full:  # the model's own logits, to compare with at the start of a run
            return self.model(**inputs).logits
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)[index]
        head = self.model.get_output_embeddings()
        logp, entropy = _LogProbs.apply(hidden, head.weight, head.bias, targets, temperature)
        return logp, entropy if entropy_grad else entropy.detach()


class _LogProbs(torch.autograd.Function):
    """(log-prob of the target, entropy in nats) of every row of (hidden @ weight.T + bias) / temperature, both [tokens].

    Logits of [batch, length, vocabulary] never exist: peak memory does not grow with length x vocabulary. They exist for one
    chunk of rows at a time; the backward pass computes them again and turns them into their own gradient in place.
    With p the probabilities, H the entropy, 1 the one-hot target:
        d logp / d logits = (1 - p) / temperature,      d H / d logits = -p (log p + H) / temperature"""
    ELEMENTS = {"cpu": 2 ** 24, "cuda": 2 ** 28}  # of a chunk's logits: 64 MiB and 1 GiB, whatever the vocabulary

    @staticmethod
    def chunks(hidden, weight):
        rows = max(1, _LogProbs.ELEMENTS.get(hidden.device.type, 2 ** 28) // len(weight))
        return [slice(i, i + rows) for i in range(0, len(hidden), rows)]

    @staticmethod
    def logits(hidden, weight, bias, temperature):
        logits = torch.nn.functional.linear(hidden, weight, bias).float()
        return logits.div_(temperature) if temperature != 1 else logits

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, temperature):
        logp, entropy, log_z = (torch.empty(len(hidden), device=hidden.device) for _ in range(3))
        for rows in _LogProbs.chunks(hidden, weight):
            logits = _LogProbs.logits(hidden[rows], weight, bias, temperature)
            target = logits.gather(-1, targets[rows, None]).squeeze(-1)
            largest = logits.amax(-1)
            weights = logits.sub_(largest[:, None]).exp()
            z = weights.sum(-1)
            entropy[rows] = z.log() - weights.mul_(logits).sum(-1) / z
            log_z[rows] = largest + z.log()
            logp[rows] = target - log_z[rows]
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return logp, entropy

    @staticmethod
    def backward(ctx, grad_logp, grad_entropy):
        hidden, weight, bias, targets, log_z, entropy = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        grad_bias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
        for rows in _LogProbs.chunks(hidden, weight):
            scale = torch.zeros_like(log_z[rows]) if grad_logp is None else grad_logp[rows] / ctx.temperature
            grad = _LogProbs.logits(hidden[rows], weight, bias, ctx.temperature).sub_(log_z[rows, None])
            if grad_entropy is None:
                grad = grad.exp_().mul_(-scale[:, None])
            else:
                factor = grad_entropy[rows, None] / ctx.temperature
                grad = grad.exp().neg_().mul_((grad + entropy[rows, None]).mul_(factor).add_(scale[:, None]))
            grad.scatter_add_(-1, targets[rows, None], scale[:, None])
            if bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(hidden.dtype)
            torch.mm(grad, weight, out=grad_hidden[rows])
            if grad.dtype == torch.float32:
                grad_weight.addmm_(grad.T, hidden[rows])
            else:
                grad_weight += grad.T @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None if bias is None else grad_bias.to(bias.dtype), None, None


class Policy:
    """A Hugging Face causal LM with float32 master weights, sharded with FSDP2 where there are ranks or a GPU."""

    def __init__(self, args, model: str, device, dtype, trainable: bool = True):
        self.args, self.device, self.trainable, self.version = args, device, trainable, 0
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, trust_remote_code=args.trust_remote_code)
        self.head = _Head(self.model).train(trainable)
        self.tokens = Counter()  # since it was cleared: real, padded, computed (packed: a prompt counts once), and rows
        for module in self.model.modules():  # dropout would make the sampler and the trainer two different policies
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            for name, value in list(vars(module).items()):
                if "dropout" in name and type(value) in (int, float):
                    setattr(module, name, 0.0)
        self._choose_attention()
        config = self.model.config.get_text_config()
        layers = next(m for m in self.model.base_model.modules() if isinstance(m, torch.nn.ModuleList)
                      and len(m) == config.num_hidden_layers)
        if trainable and args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.head.requires_grad_(trainable)
        if args.compile:
            torch._dynamo.config.recompile_limit = 64  # policy and reference, with and without gradients, share layers' code
            for layer in layers:
                layer.compile()
        if distributed():
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
            shape, names = ((args.hsdp, self.ranks // args.hsdp), ("replicate", "shard")) if args.hsdp > 1 else ((self.ranks,), ("shard",))
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
            offload = CPUOffloadPolicy() if args.param_offload and not trainable and device.type == "cuda" else OffloadPolicy()
            options = dict(mesh=mesh, offload_policy=offload,
                           mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32))
            for layer in layers:
                fully_shard(layer, **options)
            fully_shard(self.head, **options)  # embeddings, norm and (tied) head stay one group
        if trainable:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, betas=(0.9, 0.999),
                                               weight_decay=args.weight_decay, fused=True)  # no copies of the largest parameter
            self.model.train()
        self.sums, self.bad_steps = {}, 0

    def _choose_attention(self) -> None:
        """Packed, where all layers attend to the whole row (no sliding window within the lengths of this run, no recurrence)
        and the model then gives its own log-probs; else padded rows. Raises UserError where these are not its own either."""
        args, config = self.args, self.model.config.get_text_config()
        window = getattr(config, "sliding_window", None) or math.inf
        whole = {"full_attention", "sliding_attention" if window >= args.max_prompt_tokens + args.max_new_tokens else ""}
        kinds = {*(getattr(config, "layer_types", None) or ["sliding_attention"])}
        self.packed = args.attention == "packed" and kinds <= whole and self.model._supports_sdpa
        if self.packed:
            self.model.set_attn_implementation("packed")
            try:
                self.packed = self._head_is_right()
            except TypeError:  # a forward that takes no further arguments
                self.packed = False
            if not self.packed:
                self.model.set_attn_implementation("sdpa")
        if not self.packed and not self._head_is_right():
            raise UserError(f"the architecture {self.model.config.model_type} does not compute its logits as head(hidden "
                            "states); extend _Head in policy.py before training it.")
        if args.attention == "packed" and not self.packed and self.trainable and self.rank == 0:
            print(f"The architecture {self.model.config.model_type} cannot be packed: micro-batches are padded rows.", flush=True)
        if args.attention not in ("packed", "sdpa"):  # only now: the check runs in float32 on the CPU, where some do not
            try:
                self.model.set_attn_implementation(args.attention)
            except (ImportError, ValueError, KeyError) as error:
                raise UserError(f"--attention is '{args.attention}', but this cannot be used here: {error}") from None

    @torch.no_grad()
    def _head_is_right(self) -> bool:
        """Whether our head and our rows give the model's own log-probs (some architectures scale or cap their logits)."""
        a, b = (Rollout([5, 6, 7], ids, torch.zeros(0), True) for ids in ([8, 9, 10], [11, 12, 13, 14]))
        self.head.eval()
        full = []
        for r in (a, b):
            ids = torch.tensor([r.prompt_ids + r.response_ids])
            logits = self.head(dict(input_ids=ids), None, None, 1.0, full=True)[0, 2:-1].float()
            full.append(torch.log_softmax(logits, -1).gather(-1, ids[0, 3:, None]).squeeze(-1))
        inputs, index = self._inputs([a, b], "cpu")
        logp, _ = self.head(inputs, index, torch.tensor(a.response_ids + b.response_ids), 1.0)
        self.head.train(self.trainable)
        self.tokens.clear()
        return torch.allclose(logp, torch.cat(full), atol=1e-3)

    def _inputs(self, rollouts: list[Rollout], device) -> tuple[dict, torch.Tensor]:
        """The model's inputs, and the places [response tokens] in its flattened output that predict them: one before each.

        Packed: one row that holds each different prompt once and then its responses. Otherwise padded rows; padding is on the
        right and attention causal, so no mask is needed. A response's last token predicts nothing and is left out."""
        longest = max(len(r.prompt_ids) + len(r.response_ids) - 1 for r in rollouts)
        ids, positions, unpack, pack, index, prompts = [], [], [], [], [], {}
        for i, r in enumerate(rollouts):
            prompt, row = prompts.get(tuple(r.prompt_ids)), i * longest
            if prompt is None or not self.packed:
                prompt = prompts[tuple(r.prompt_ids)] = range(len(ids), len(ids) + len(r.prompt_ids))
                ids += r.prompt_ids
                positions += range(len(prompt))
                pack += range(row, row + len(prompt))
            response = range(len(ids), len(ids) + len(r.response_ids) - 1)
            ids += r.response_ids[:-1]
            positions += range(len(prompt), len(prompt) + len(response))
            pack += range(row + len(prompt), row + len(prompt) + len(response))
            places = [*prompt, *response]
            unpack.append(places + [0] * (longest - len(places)))
            index += places[len(prompt) - 1:]
            self.tokens["real"] += len(places)
        self.tokens.update(padded=len(rollouts) * longest, computed=len(ids), rows=len(rollouts))
        tensor = lambda values: torch.tensor(values, device=device)  # noqa: E731
        inputs = dict(input_ids=tensor([ids]), position_ids=tensor([positions]), unpack=tensor(unpack), pack=tensor(pack))
        if self.packed:
            return inputs, tensor(index)
        return dict(input_ids=inputs["input_ids"][0][inputs["unpack"]]), inputs["pack"][index]

    def logprobs(self, micro: MicroBatch, entropy_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and full-vocabulary entropies (nats) of a micro-batch's response tokens, both [tokens].

        From logits / temperature. Where the rollouts have no old log-probs yet, these (detached) become them."""
        inputs, index = self._inputs(micro.rollouts, self.device)
        targets = torch.tensor([t for r in micro.rollouts for t in r.response_ids], device=self.device)
        logp, entropy = self.head(inputs, index, targets, self.args.temperature, entropy_grad)
        if self.trainable and self.updates == 0:  # still the policy that sampled: the sync proof can use these
            for r, piece in zip(micro.rollouts, logp.detach().cpu().split(micro.lengths.tolist())):
                r.trainer_logprobs = piece
        if self.trainable and micro.old_logprobs is None:
            micro.old_logprobs = logp.detach()
        if self.args.tis_cap and micro.old_logprobs is not None:
            micro.tis = (micro.old_logprobs - micro.concat("logprobs")).exp().clamp(max=self.args.tis_cap)
        return logp, entropy

    updates = 0
    """Optimizer steps since the last rollouts were sampled."""

    def micro_batches(self, rollouts: list[Rollout], parts: list[list[Rollout]] | None = None):
        """This rank's micro-batches of one optimizer step, with token weights that sum to 1 over all ranks.

        sequence: every response weighs 1/n, each of its tokens 1/(n T). token: every token weighs the same.
        `parts`: groups aggregated separately and then summed (Dynamic RL's questions and solutions)."""
        weight = {}
        for part in parts or [rollouts]:
            tokens = sum(len(r.response_ids) for r in part)
            for r in part:
                sequence = self.args.loss_aggregation == "sequence"
                weight[id(r)] = 1 / (len(part) * len(r.response_ids)) if sequence else 1 / tokens
        yield from self._share(rollouts, [weight[id(r)] for r in rollouts])

    def _share(self, rollouts, weights):
        lengths = [len(r.prompt_ids) + len(r.response_ids) for r in rollouts]
        order = {tuple(r.prompt_ids): i for i, r in enumerate(rollouts)} if self.packed else {}
        prompts = [order.get(tuple(r.prompt_ids), 0) for r in rollouts]  # packed: one prompt's responses stay together
        for indices in plan_micro_batches(lengths, self.ranks, self.args.micro_tokens, prompts)[self.rank]:
            if indices:
                yield MicroBatch([rollouts[i] for i in indices], [weights[i] for i in indices], self.device)
            else:  # nothing left for this rank: it computes the shortest sequence once more, with weight zero
                i = min(range(len(rollouts)), key=lengths.__getitem__)
                yield MicroBatch([rollouts[i]], [0.0], self.device)

    @torch.no_grad()
    def score(self, rollouts: list[Rollout], into: str = "old_logprobs") -> None:
        """Set `into` (and `entropies`) of every rollout, on every rank, from one forward pass shared by the ranks."""
        mine = {}
        index = {id(r): i for i, r in enumerate(rollouts)}
        for micro in self._share(rollouts, [1.0] * len(rollouts)):
            logp, entropy = self.logprobs(micro)
            sizes = micro.lengths.tolist()
            if micro.weights.any():
                for r, lp, h in zip(micro.rollouts, logp.cpu().split(sizes), entropy.cpu().split(sizes)):
                    mine[index[id(r)]] = (lp, h)
        for part in gather(mine):
            for i, (lp, h) in part.items():
                setattr(rollouts[i], into, lp)
                if into == "old_logprobs":
                    rollouts[i].trainer_logprobs, rollouts[i].entropies = lp, h

    def backward(self, micro: MicroBatch, loss: torch.Tensor, **metrics: torch.Tensor) -> None:
        """Accumulate gradients of the weighted sum of per-token losses [tokens]; sum up per-token metrics alike."""
        total = (loss * micro.weights).sum()
        (total * self.ranks).backward()  # FSDP averages over ranks, the weights already sum to 1 over them
        for name, values in dict(metrics, loss=loss).items():
            self.sums[name] = self.sums.get(name, 0.0) + (values.detach().float() * micro.weights).sum()

    def step(self, lr: float) -> dict[str, float]:
        """Clip, apply, zero the gradients. Returns loss, grad_norm and the metrics, over all ranks.

        A non-finite loss or gradient skips the update and is counted in `bad_steps`."""
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.grad_clip, foreach=True)
        norm = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        names = sorted(self.sums)
        sums = torch.stack([self.sums[name] for name in names])
        if distributed():
            dist.all_reduce(sums)
        metrics = dict(zip(names, sums.tolist()), grad_norm=norm)
        if math.isfinite(norm) and math.isfinite(metrics["loss"]):
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.bad_steps, self.version = 0, self.version + 1
        else:
            self.bad_steps += 1
        self.optimizer.zero_grad(set_to_none=True)
        self.sums, self.updates = {}, self.updates + 1
        return metrics

    def flops_per_token(self, length: float, computed: float = 1.0) -> float:
        """6 N + 12 L H D T / 2, forward and backward of one token in a sequence of T, causal attention; for the MFU.

        computed: the share of the tokens that all but attention computes (a shared prompt counts once)."""
        config, embedding = self.model.config.get_text_config(), self.model.get_input_embeddings().weight.numel()
        matmul = sum(p.numel() for p in self.model.parameters()) - (0 if config.tie_word_embeddings else embedding)
        return 6 * matmul * computed + 12 * config.num_hidden_layers * config.hidden_size * length / 2

    def named_tensors(self, dtype):
        """Every parameter once (tied ones, too) as a full tensor, gathered one at a time: a collective."""
        for name, parameter in self.model.named_parameters():
            tensor = parameter.detach()
            yield name, (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor.clone()).to(dtype)

    def save(self, folder: Path, tokenizer) -> None:
        """Hugging Face format, loadable by from_pretrained; written to one side and renamed."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
        options = StateDictOptions(full_state_dict=True, cpu_offload=True) if distributed() else None
        state = get_model_state_dict(self.model, options=options)
        if self.rank == 0:
            state = {k: v for k, v in state.items() if k not in (self.model._tied_weights_keys or {}) or
                     not self.model.config.get_text_config().tie_word_embeddings}
            partial = folder.with_name(folder.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)
            self.model.save_pretrained(partial, state_dict=state)
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)


def k3(logp: torch.Tensor, ref_logprobs: torch.Tensor | None) -> torch.Tensor:
    """KL to the reference, estimated per token: exp(ref - lp) - (ref - lp) - 1, never negative; zeros without one."""
    if ref_logprobs is None:
        return torch.zeros_like(logp)
    difference = ref_logprobs - logp
    return difference.exp() - difference - 1


def distributed() -> bool:
    """Whether this process is one of torchrun's ranks (vLLM opens a group of its own where it is not)."""
    return dist.is_initialized() and "RANK" in os.environ


def gather(item) -> list:
    """The item of every rank, in rank order, on every rank."""
    if not distributed():
        return [item]
    items = [None] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items
