"""The command `draft-head`: the model answers prompts, and a head learns to draft these answers."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..cli.build import load_model
from ..cli.prompt import encoded_prompts, read_prompts
from ..cli.terminal import note, progress_bar, show_compiling
from ..decoding.heads import BYTES_IN_USE
from ..errors import GearbxError
from ..files.journal import JOURNAL, Journal, hash_of_tokens
from ..files.reading import read_text
from ..files.writing import check_directory, make_directory, write_text
from ..kernels.device import available_memory, device_in_use, recommended_memory
from ..loading import adapter_contents, model_contents, model_name
from ..settings import human_bytes
from . import DraftHeadSettings
from .answers import TOGETHER, Answer, divided, write_answers
from .layer import PLACES, HeadShape
from .prompts import bundled_prompts
from .target import HeadTarget
from .training import BATCH_TOKENS, Trainer, frequent_tokens, save_head, tokens_a_round

CHECKPOINT = "state.safetensors"
STATE = "training"  # directory in the output with what a next call continues
FIRST_TOKENS, FIRST_SEEN = 125_000, 1_000_000  # tokens of answers written and trained on, for a first head
WRITING_SHARE = 1 / 3  # share of the time for answers
REMOVE = "remove it, or use --minutes"
TESTS = 10  # in all
MIN_TEST_SECONDS = 10.0  # between tests


class PreparedTraining(NamedTuple):
    """A trainer with the state of earlier calls. seconds: of the whole training without the answers."""

    trainer: Trainer
    seconds: float
    writing: float
    config: dict[str, Any]
    texts: list[str]


def run(settings: DraftHeadSettings) -> int:
    out, prepared = Path(settings.training.out), prepare(settings)
    if prepared.trainer.seconds >= prepared.seconds:
        minutes = (prepared.trainer.seconds + prepared.writing) / 60
        raise GearbxError(f"{out}: trained for {minutes:.3g} minutes already; use more --minutes to continue")
    shares = ", ".join(f"{share:.0%}" for share in trained(settings, prepared))
    print(f"{out}: drafted tokens correct at positions 1 to {PLACES}: {shares}")
    return 0


def prepare(settings: DraftHeadSettings) -> PreparedTraining:
    """Return a trainer with the model's answers, new or from earlier calls, and their checkpoint.

    Raises:
        GearbxError: prompts, a model or a state that cannot be used, too little memory.
    """
    out = Path(settings.training.out)
    check_directory(out)
    texts = bundled_prompts() if settings.answers.data is None else read_prompts(Path(settings.answers.data))
    texts = texts[: settings.answers.num_prompts]
    model, tokenizer, config = load_model(settings.model)
    show_compiling()
    shape = shape_of(settings, config)
    check_room(shape)
    target = HeadTarget(model, model_name(settings.model.model))
    prompts = encoded_prompts(texts, settings.answers, tokenizer, config)
    make_directory(out / STATE)
    inputs = record_inputs(settings, shape, prompts)
    journal = Journal(out / STATE / f"answers{JOURNAL}", inputs, Answer)
    answers, seconds = answered(settings, target, tokenizer, prompts, journal, shape)
    train, held = divided(answers)
    trainer = Trainer(target, shape, frequent_tokens(train, shape.draft_vocab_size, shape.vocab_size), train, held)
    if (out / STATE / CHECKPOINT).exists():
        trainer.resume(out / STATE / CHECKPOINT)
    writing = max(each.seconds for each in answers)
    return PreparedTraining(trainer, max(seconds - writing, seconds / 2), writing, config, texts)


def shape_of(settings: DraftHeadSettings, config: dict[str, Any]) -> HeadShape:
    """Return the sizes of the head: the model's, or the flags'. Raises GearbxError for sizes that do not fit."""
    own, asked = config.get("text_config") or config, settings.training
    size, vocab_size = int(own["hidden_size"]), int(own["vocab_size"])
    heads = int(own.get("num_attention_heads") or max(1, size // 64))
    keys = int(own.get("num_key_value_heads") or heads)
    chosen = asked.num_attention_heads or heads
    if chosen > heads or heads % chosen:
        raise GearbxError(f"--num-attention-heads: must divide the model's {heads}, got {chosen}; use a divisor")
    rope = own.get("rope_parameters") or {}
    return HeadShape(
        hidden_size=size,
        intermediate_size=asked.intermediate_size or int(own.get("intermediate_size") or 4 * size),
        num_attention_heads=chosen,
        num_key_value_heads=next(n for n in range(max(1, keys * chosen // heads), 0, -1) if chosen % n == 0),
        head_dim=int(own.get("head_dim") or size // heads),
        vocab_size=vocab_size,
        draft_vocab_size=min(asked.draft_vocab_size, vocab_size),
        rms_norm_eps=float(own.get("rms_norm_eps") or 1e-6),
        rope_theta=float(own.get("rope_theta") or rope.get("rope_theta") or 10000.0),
    )


def check_room(shape: HeadShape) -> None:
    """Validate that memory suffices, beside the model. Raises GearbxError otherwise."""
    weights = 4 * 4 * shape.parameters  # with gradients and two moments, float32
    rows = 4 * shape.draft_vocab_size * (shape.hidden_size + 2 * (PLACES + 1) * BATCH_TOKENS)
    states = 4 * 2 * BATCH_TOKENS * PLACES * (8 * shape.hidden_size + 3 * shape.intermediate_size)
    needed, limit = weights + rows + states, recommended_memory() or available_memory()
    if needed > limit:
        raise GearbxError(
            f"draft-head: training needs about {human_bytes(needed)} beside the model, got {human_bytes(limit)} of "
            "memory; use fewer --draft-vocab-size, or a larger machine"
        )


def record_inputs(
    settings: DraftHeadSettings, shape: HeadShape, prompts: Sequence[tuple[list[int], int]]
) -> dict[str, Any]:
    """Return all inputs that answers and checkpoints depend on."""
    return {
        "model contents": model_contents(settings.model.model),
        "adapter contents": adapter_contents(settings.model.adapter_path),
        "prompts": hash_of_tokens([tokens for tokens, _ in prompts]),
        "max_tokens": settings.answers.max_tokens,
        "extra_eos_token": [*settings.model.extra_eos_token],
        "device": device_in_use(),
        **vars(shape),
    }


def answered(
    settings: DraftHeadSettings,
    target: HeadTarget,
    tokenizer: Any,
    prompts: Sequence[tuple[list[int], int]],
    journal: Journal,
    shape: HeadShape,
) -> tuple[list[Answer], float]:
    """Return the model's answers, and the seconds of the whole training, by --minutes or estimated."""
    kept = Path(settings.training.out) / STATE / "seconds.txt"
    seconds = None if settings.training.minutes is None else 60 * settings.training.minutes
    if seconds is None and kept.exists():
        seconds = kept_seconds(kept)

    def written(answers: Sequence[Answer]) -> int:
        return sum(len(each.tokens) - each.start for each in answers)

    def total(answers: Sequence[Answer]) -> float:
        """Return the seconds, estimated and kept at the first call."""
        nonlocal seconds
        if seconds is None:
            rate = written(answers) / max(each.seconds for each in answers)
            seconds = estimated(target, shape, answers, rate)
            write_text(kept, f"{seconds}\n")
            about = f"about {seconds / 60:.2g} minutes for a first head"
            note(f"{about}; Ctrl-C keeps the best, the same command continues")
        return seconds

    def enough(answers: Sequence[Answer]) -> bool:
        used = time.monotonic() - started + before
        return len(answers) >= 2 * TOGETHER and used > WRITING_SHARE * total(answers)

    before = max((each.seconds for each in journal.parts.values()), default=0.0)
    started = time.monotonic()
    with progress_bar() as progress:
        task = progress.add_task("answering prompts", total=len(prompts), completed=len(journal.parts))
        answers = write_answers(target, tokenizer, prompts, journal, enough, lambda answer: progress.advance(task))
    if not answers:
        raise GearbxError("draft-head: no answers; use more --minutes")
    if all(len(each.tokens) - each.start == prompts[each.number][1] for each in answers):
        note(f"no answer ended within {settings.answers.max_tokens} tokens; use a larger --max-tokens if they should")
    return answers, total(answers)


def kept_seconds(file: Path) -> float:
    """Return an earlier estimate. Raises GearbxError for a damaged file."""
    text, remedy = read_text(file, "a number of seconds", REMOVE), REMOVE
    try:
        return float(text)
    except ValueError as error:
        raise GearbxError(f"{file}: not a number of seconds; {remedy}") from error


def estimated(target: HeadTarget, shape: HeadShape, answers: Sequence[Answer], rate: float) -> float:
    """Return seconds for a first head, from the speed of a step of training. rate: tokens written per second."""
    train = [each for each in answers if len(each.tokens) - each.start > 1]
    if not train:
        raise GearbxError("draft-head: the model's answers are empty; use other prompts")
    trainer = Trainer(target, shape, frequent_tokens(train, shape.draft_vocab_size, shape.vocab_size), train, train)
    trainer.train_step(0.5)  # compiles; two places, as on average
    start, seen = time.monotonic(), trainer.seen
    trainer.train_step(0.5)
    training = FIRST_SEEN * (time.monotonic() - start) / max(1, trainer.seen - seen)
    return FIRST_TOKENS / rate + training


def trained(settings: DraftHeadSettings, prepared: PreparedTraining) -> list[float]:
    """Train until the time is over, and return the shares of correct tokens in the last test.

    Each test writes a checkpoint, and the head if it is the best so far.
    """
    trainer, seconds, config = prepared.trainer, prepared.seconds, prepared.config
    out, places = Path(settings.training.out), [0.0]
    costs, weights = pass_costs(trainer.target), trainer.shape.parameters + trainer.rows.size
    head_cost = BYTES_IN_USE * weights / trainer.target.nbytes
    pause = max(MIN_TEST_SECONDS, seconds / TESTS)
    due = trainer.seconds + pause / 4
    with progress_bar() as progress, noting_interrupt(out, trainer):
        task = progress.add_task("training, seconds", total=round(seconds), completed=round(trainer.seconds))
        while trainer.seconds < seconds:
            start = time.monotonic()
            loss = trainer.train_step(trainer.seconds / seconds)
            trainer.seconds += time.monotonic() - start
            if trainer.seconds >= min(due, seconds):
                places, due = trainer.test(), trainer.seconds + pause
                if tokens_a_round(places) > trainer.best:
                    trainer.best = tokens_a_round(places)
                    save_head(out, trainer, config, settings.training.q_bits, settings.training.embeddings)
                trainer.save(out / STATE / CHECKPOINT)
            shares = " ".join(f"{share:.2f}" for share in places)
            predicted = predicted_speedup(places, costs, head_cost)
            text = f"training: loss {loss:.2f}, correct {shares}, about {predicted:.2f}× plain decoding, seconds"
            progress.update(task, completed=round(trainer.seconds), description=text)
    return places


@contextmanager
def noting_interrupt(out: Path, trainer: Trainer) -> Iterator[None]:
    """Print a note after Ctrl-C about the head that is kept."""
    try:
        yield
    except KeyboardInterrupt:
        found = "has the best head so far" if trainer.best else "has no head yet"
        note(f"{out}: {found}; the same command continues")
        raise


def pass_costs(target: HeadTarget) -> list[float]:
    """Return the time of passes over 1 to PLACES + 1 rows, relative to one row."""
    cache = make_prompt_cache(target.model)
    best = list[float]()
    mx.eval(target.model(mx.zeros((1, 16), mx.int32), cache=cache))
    for rows in range(1, PLACES + 2):
        times = []
        for _ in range(6):
            start = time.perf_counter()
            mx.eval(target.model(mx.zeros((1, rows), mx.int32), cache=cache))
            times.append(time.perf_counter() - start)
        best.append(max([min(times), *best[-1:]]))  # more rows never take less time, except by chance
    return [each / best[0] for each in best]


def predicted_speedup(places: Sequence[float], costs: Sequence[float], head_cost: float) -> float:
    """Return the predicted speed over plain decoding, at the best draft length; 1.0 if drafts are slower.

    Args:
        places: shares of correct tokens.
        costs: of passes over 1, 2, ... rows.
        head_cost: of a step of the head, by its weights. Unit of costs: a pass over one row.
    """
    return max(tokens_a_round(places[:k]) / (costs[k] + k * head_cost) for k in range(len(places) + 1))
