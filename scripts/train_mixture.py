"""Train a small mixture of experts (Qwen 2 MoE, with a shared expert), to measure tables of XFP that need a real one.

    pip install -e '.[train]'
    python scripts/train_mixture.py --data DIR --out mixture

Texts, tokenizer and training are those of train_demo_model.py, whose flags it takes. The model does not ship.
"""

import random

import torch
from demo_corpora import load_corpora
from train_demo_model import CONTEXT, encode, perplexities, save, setup_arg_parser, train, train_tokenizer
from transformers import PreTrainedTokenizerFast, Qwen2MoeConfig, Qwen2MoeForCausalLM


def make_mixture(tokenizer: PreTrainedTokenizerFast, width: int, layers: int, experts: int) -> Qwen2MoeForCausalLM:
    """A random mixture: each token goes through 4 routed experts, half as wide as the model, and a shared one."""
    end = tokenizer.eos_token_id
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            moe_intermediate_size=width // 2,
            shared_expert_intermediate_size=width,
            num_experts=experts,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            output_router_logits=True,  # their loss keeps experts in even use
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=False,  # mlx-lm's class has a head of its own
            bos_token_id=end,
            eos_token_id=end,
        )
    )


def main() -> None:
    parser = setup_arg_parser()
    parser.description = "Train a small mixture of experts."
    parser.add_argument("--experts", type=int, default=32)
    parser.set_defaults(width=128, layers=3, steps=600, eval_every=300)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    corpora = load_corpora(args.data)
    documents = [document for corpus in corpora for document in corpus.train]
    random.Random(args.seed).shuffle(documents)
    tokenizer = train_tokenizer(documents, args.vocab_size)
    valid = {corpus.name: encode(tokenizer, corpus.valid) for corpus in corpora}
    model = make_mixture(tokenizer, args.width, args.layers, args.experts)
    print(f"{model.num_parameters():,} parameters")
    best = train(model, encode(tokenizer, documents), valid, args)
    model.load_state_dict(best["model"])
    print("validation perplexity: " + ", ".join(f"{k} {v:.2f}" for k, v in perplexities(model, valid)[1].items()))
    save(model, tokenizer, args.out)


if __name__ == "__main__":
    main()
