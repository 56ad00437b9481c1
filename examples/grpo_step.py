"""One GRPO step on a small MoE of Transformers: sample, score, train, with and without routing replay.

    pip install -e '.[transformers]'   # in a checkout of this repository
    python examples/grpo_step.py

Nothing is downloaded: the model is a Qwen3-MoE with random weights, and the reward counts even tokens. The example
shows how far the training forward's log-probabilities are from those with which tokens were sampled. Both have the same
weights, so the ratio of the policies should be 1. One run samples with the training's experts, ``fp8_flow``, another
with Transformers' ``batched_mm``, which stands for another engine. Replay gives the training forward the experts that
sampling chose.

On a CPU, in fp32, it takes a minute. A CPU emulates FP8, so its speed means nothing.
"""

import contextlib

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from titan_fp8moe import record_routing, replay_routing
from titan_fp8moe import transformers as fp8

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
VOCABULARY, PROMPTS, GROUP, PROMPT_LENGTH, SAMPLED = 128, 4, 4, 12, 20
CLIP = 0.2


def make_model() -> Qwen3MoeForCausalLM:
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=16,
        num_experts_per_tok=4,
        initializer_range=0.06,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen3MoeForCausalLM(config).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)


def logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def sample(model: Qwen3MoeForCausalLM, implementation: str, prompts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sequences (B, S), log-probabilities of the sampled tokens, and the routing (B, S, L, K)."""
    model.set_experts_implementation(implementation)
    model.eval()
    with record_routing(model) as routing:
        done = model.generate(
            prompts,
            max_new_tokens=SAMPLED,
            do_sample=True,
            top_k=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
    routed = F.pad(routing.routed_experts(), (0, 0, 0, 0, 0, 1), value=-1)  # nobody has routed the last token
    sampled = done.sequences[:, PROMPT_LENGTH:]
    return done.sequences, logprobs(torch.stack(done.logits, 1), sampled), routed


def score(model: Qwen3MoeForCausalLM, sequences: Tensor) -> Tensor:
    """Log-probabilities of the sampled tokens in one forward, as training computes them."""
    logits = model(input_ids=sequences, use_cache=False).logits
    return logprobs(logits[:, PROMPT_LENGTH - 1 : -1], sequences[:, PROMPT_LENGTH:])


def advantages(sequences: Tensor) -> Tensor:
    """(B, 1): rewards relative to those of the same prompt's group."""
    rewards = (sequences[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1).view(PROMPTS, GROUP)
    return ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).view(-1, 1)


def step(model: Qwen3MoeForCausalLM, sequences: Tensor, sampled_logprobs: Tensor, routed: Tensor | None) -> None:
    """Prints how far the two forwards are apart, and takes a step of the clipped policy gradient."""
    model.set_experts_implementation("fp8_flow")
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    replay = contextlib.nullcontext() if routed is None else replay_routing(model, routed)
    with replay:  # the backward too: gradient checkpointing would repeat the forward
        current = score(model, sequences)
        ratio = (current - sampled_logprobs).exp()
        gain = advantages(sequences) * torch.stack([ratio, ratio.clamp(1 - CLIP, 1 + CLIP)])
        gain.amin(0).mean().neg().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    difference, clipped = (current - sampled_logprobs).detach().abs(), (ratio - 1).abs() > CLIP
    print(
        f"{'no' if routed is None else 'yes':>6} {difference.mean():>12.5f} {difference.max():>10.4f} "
        f"{clipped.float().mean():>8.1%} {norm:>9.4f}"
    )


def main() -> None:
    torch.manual_seed(0)
    fp8.register()
    first = make_model()
    prompts = torch.randint(VOCABULARY, (PROMPTS, PROMPT_LENGTH), device=DEVICE).repeat_interleave(GROUP, 0)
    print(f"{'sampled with':>12} {'replay':>6} {'|d logprob|':>12} {'largest':>10} {'clipped':>8} {'grad norm':>9}")
    for implementation in ("fp8_flow", "batched_mm"):
        torch.manual_seed(1)
        sequences, sampled_logprobs, routed = sample(first, implementation, prompts)
        for replayed in (None, routed):
            model = make_model()
            model.load_state_dict(first.state_dict())
            print(f"{implementation:>12}", end=" ")
            step(model, sequences, sampled_logprobs, replayed)


if __name__ == "__main__":
    main()
