"""Train the small Llama that ships with the package (gearbx_mlx/demo_model).

    pip install -e '.[train]'
    python scripts/train_demo_model.py --data DIR --out gearbx_mlx/demo_model

DIR contains gsm8k_train.jsonl (openai/grade-school-math, MIT), grimms_fairy_tales.txt (Project Gutenberg) and
tinyshakespeare.txt (public domain). The last 5 % of each file is the validation split. Training writes the
weights of the lowest validation loss. It stops early after --patience evaluations without a lower one. The same command
continues an interrupted run from its last checkpoint.
"""

import argparse
import json
import math
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

END = "<|endoftext|>"
CONTEXT = 512
VALIDATION_SHARE = 0.05
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'user' %}Question: {{ message['content'] }}\nAnswer:"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)


@dataclass
class Corpus:
    """Documents of one kind of text, split into training and validation."""

    name: str
    licence: str
    train: list[str]
    valid: list[str]


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Training and validation documents: the last 5 % of the characters, in whole documents, are for validation."""
    total, seen = sum(map(len, documents)), 0
    for i, document in enumerate(documents):
        seen += len(document)
        if seen > (1 - VALIDATION_SHARE) * total:
            return documents[:i], documents[i:]
    return documents, []


def word_problems(path: Path) -> list[str]:
    rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return [f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows]


def prose(path: Path, length: int = 1600) -> list[str]:
    """Documents of about `length` characters: paragraphs without their line wraps."""
    paragraphs = [" ".join(p.split()) for p in re.split(r"\n\s*\n", path.read_text(encoding="utf-8"))]
    return gather([p for p in paragraphs if p], length)


def verse(path: Path, length: int = 1600) -> list[str]:
    """Documents of about `length` characters: speeches with their line breaks, which mean something in a play."""
    return gather([s for s in path.read_text(encoding="utf-8").split("\n\n") if s.strip()], length)


def gather(paragraphs: list[str], length: int) -> list[str]:
    documents, current = [], ""
    for paragraph in paragraphs:
        current = f"{current}\n\n{paragraph}" if current else paragraph
        if len(current) >= length:
            documents.append(current)
            current = ""
    return [*documents, current] if current else documents


def load_corpora(data: Path) -> list[Corpus]:
    return [
        Corpus("gsm8k", "MIT", *split(word_problems(data / "gsm8k_train.jsonl"))),
        Corpus("fairy_tales", "public domain", *split(prose(data / "grimms_fairy_tales.txt"))),
        Corpus("shakespeare", "public domain", *split(verse(data / "tinyshakespeare.txt"))),
    ]


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer. Every digit is a token, so that the model reads numbers place by place."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
    )


def encode(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> torch.Tensor:
    """Return the documents as one stream of tokens; each begins with the end-of-text token of the one before."""
    ids = tokenizer(documents, add_special_tokens=True, verbose=False)["input_ids"]
    return torch.tensor([i for document in ids for i in document])


def make_model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> LlamaForCausalLM:
    """Return a random Llama: 5.5 M parameters at width 256 and 6 layers. All input widths are multiples of 64."""
    end = tokenizer.eos_token_id
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=64 * round(2.75 * width / 64),
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=end,
            eos_token_id=end,
        )
    )


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, stream: torch.Tensor, batch: int = 8) -> tuple[float, int]:
    """Return the sum of the negative log-likelihood in nats, and the number of tokens."""
    windows = [stream[i : i + CONTEXT + 1] for i in range(0, len(stream) - 1, CONTEXT)]
    total, count = 0.0, 0
    model.eval()
    for i in range(0, len(windows), batch):
        rows = torch.nn.utils.rnn.pad_sequence(windows[i : i + batch], batch_first=True, padding_value=-100)
        targets = rows[:, 1:]
        logits = model(rows[:, :-1].clamp(min=0)).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
        )
        total, count = total + loss.item(), count + int((targets != -100).sum())
    model.train()
    return total, count


def perplexities(model: LlamaForCausalLM, streams: dict[str, torch.Tensor]) -> tuple[float, dict[str, float]]:
    """Return the mean loss over all validation tokens, and the perplexity of each kind of text."""
    sums = {name: validation_loss(model, stream) for name, stream in streams.items()}
    mean = sum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())
    return mean, {name: math.exp(total / count) for name, (total, count) in sums.items()}


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Return the learning rate: a linear warm-up, then a cosine down to a tenth."""
    if step < args.warmup:
        return args.learning_rate * (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    return args.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def save_checkpoint(path: Path, state: dict) -> None:
    beside = path.with_suffix(".part")
    torch.save(state, beside)
    beside.replace(path)


def step_loss(model, stream, step: int, generator: torch.Generator, args: argparse.Namespace) -> torch.Tensor:
    """Return the loss of one step.

    Three quarters of the steps use half windows, which are faster; the others whole ones, which teach every position.
    """
    halves = 2 if step < 0.75 * args.steps else 1
    length = CONTEXT // halves
    starts = torch.randint(len(stream) - length, (args.batch * halves,), generator=generator)
    rows = torch.stack([stream[i : i + length] for i in starts])
    with torch.autocast("cpu", torch.bfloat16, enabled=args.autocast):
        return model(rows, labels=rows).loss


def train(model: LlamaForCausalLM, stream: torch.Tensor, valid: dict, args: argparse.Namespace) -> dict:
    """Train with AdamW on random windows of the stream. Returns the best state."""
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": args.weight_decay}, {"params": rest, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    generator = torch.Generator().manual_seed(args.seed)
    checkpoint = args.out / "training.checkpoint"
    best: dict[str, Any] = {"loss": math.inf, "step": 0}
    step, spent = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        best, step, spent = state["best"], state["step"], state["spent"]
    began = time.monotonic() - spent

    with Progress() as progress:
        bar = progress.add_task("training", total=args.steps, completed=step)
        while step < args.steps:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            loss = step_loss(model, stream, step, generator, args)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            progress.update(bar, completed=step, description=f"loss {loss.item():.2f}")

            if step % args.eval_every and step != args.steps:
                continue
            mean, by_kind = perplexities(model, valid)
            progress.console.print(
                f"step {step}, {(time.monotonic() - began) / 60:.1f} min: training loss {loss.item():.3f}, "
                f"validation loss {mean:.4f}, perplexity "
                + ", ".join(f"{name} {value:.2f}" for name, value in by_kind.items())
            )
            if mean < best["loss"]:
                weights = {k: v.clone() for k, v in model.state_dict().items()}
                best = {"loss": mean, "step": step, "model": weights}
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "best": best}
            state |= {"generator": generator.get_state(), "step": step, "spent": time.monotonic() - began}
            save_checkpoint(checkpoint, state)
            if step - best["step"] >= args.patience * args.eval_every:
                break
    return best | {"minutes": (time.monotonic() - began) / 60, "last_step": step}


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer, with names that older readers know as well."""
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "chat_template.jinja").unlink(missing_ok=True)  # written into tokenizer_config.json below
    update_json(out / "config.json", rope_theta=10000.0, torch_dtype="bfloat16")
    update_json(out / "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast", chat_template=CHAT_TEMPLATE)
    for file in out.iterdir():
        file.chmod(0o644)


def update_json(file: Path, **values: object) -> None:
    content = json.loads(file.read_text(encoding="utf-8")) | values
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def model_card(model: LlamaForCausalLM, corpora: list[Corpus], best: dict, ppl: dict, args: argparse.Namespace) -> str:
    config, tokens = model.config, best["step"] * args.batch * CONTEXT
    rows = "\n".join(
        f"| {c.name} | {c.licence} | {sum(map(len, c.train)):,} | {sum(map(len, c.valid)):,} | {ppl[c.name]:.2f} |"
        for c in corpora
    )
    return f"""---
license: mit
library_name: mlx
tags: [gearbx-mlx, demo]
---
# The demo model of gearbx-mlx

This small model ships with gearbx-mlx, so that every command runs without a download. It writes solutions to word
problems in the style of GSM8K, with calculator marks, and a little prose and verse. **It is far too small to get sums
right.** Its purpose is to show gears on a real distribution.

The chat template turns a user's message into `Question: ...` and `Answer:`. For free text, use
`--ignore-chat-template`.

## The model

It is a Llama of {model.num_parameters():,} parameters, stored in bfloat16: width {config.hidden_size},
{config.num_hidden_layers} layers, MLP {config.intermediate_size}, {config.num_attention_heads} heads over
{config.num_key_value_heads} key-value heads, tied embedding, vocabulary {config.vocab_size}, context {CONTEXT}.

## The texts

| text | license | characters for training | for validation | validation perplexity per token |
| --- | --- | --- | --- | --- |
{rows}

The perplexities are those of the bfloat16 weights that ship, over windows of {CONTEXT} tokens. The texts are the GSM8K
training set (openai/grade-school-math), Grimms' Fairy Tales (Project Gutenberg) and tiny Shakespeare. The last
{VALIDATION_SHARE:.0%} of each file was kept for validation. The model never saw the GSM8K test set.

## The training

`scripts/train_demo_model.py` trained it with seed {args.seed} for {best["last_step"]} steps of {args.batch} x {CONTEXT}
tokens, and kept the best step, number {best["step"]} ({tokens:,} tokens). It took {best["minutes"]:.0f} minutes on
{torch.get_num_threads()} CPU threads. Optimizer: AdamW, learning rate {args.learning_rate} with {args.warmup} warm-up
steps and a cosine down to a tenth, weight decay {args.weight_decay}{", bfloat16 autocast" if args.autocast else ""};
torch {torch.__version__}.
"""


def setup_arg_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the demo model of gearbx-mlx.")
    parser.add_argument("--data", type=Path, required=True, help="Folder with the three text files.")
    parser.add_argument("--out", type=Path, required=True, help="Folder for model, tokenizer and card.")
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument(
        "--batch", type=int, default=8, help=f"Windows of {CONTEXT} tokens per step, or twice as many half ones."
    )
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--width", type=int, default=256, help="A multiple of 64.")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--eval-every", type=int, default=200)
    parser.add_argument("--patience", type=int, default=4, help="Evaluations without a gain before stopping.")
    parser.add_argument("--autocast", action="store_true", help="bfloat16 autocast (faster where the CPU has it).")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main() -> None:
    args = setup_arg_parser().parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)
    corpora = load_corpora(args.data)
    train_documents = [document for corpus in corpora for document in corpus.train]
    random.Random(args.seed).shuffle(train_documents)
    tokenizer = train_tokenizer(train_documents, args.vocab_size)
    stream = encode(tokenizer, train_documents)
    valid = {corpus.name: encode(tokenizer, corpus.valid) for corpus in corpora}
    print(f"{len(stream):,} training tokens, {sum(map(len, valid.values())):,} validation tokens")

    model = make_model(tokenizer, args.width, args.layers)
    best = train(model, stream, valid, args)
    model.load_state_dict(best["model"])
    model.to(torch.bfloat16)
    _, by_kind = perplexities(model.float(), valid)  # of the rounded weights, which are what ships
    save(model, tokenizer, args.out)
    (args.out / "README.md").write_text(model_card(model, corpora, best, by_kind, args), encoding="utf-8")
    (args.out / "training.checkpoint").unlink()
    print(f"validation perplexity of the bfloat16 weights: {by_kind}")


if __name__ == "__main__":
    main()
