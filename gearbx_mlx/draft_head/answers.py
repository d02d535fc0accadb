"""The model's own answers to prompts, the text that a draft head learns: half greedy, half sampled."""

import time
from collections.abc import Callable, Sequence

from mlx_lm.sample_utils import make_sampler
from msgspec import Struct

from ..decoding.stream import batch_generator
from ..errors import GearbxError
from ..files.journal import Journal
from ..gears.gearbox import Observer
from .target import HeadTarget

TOGETHER = 32  # answers in a batch
TEMPERATURE, MIN_P = 0.8, 0.02  # sampling of every second answer
SHORTEST = 4  # tokens of an answer that has something to draft
HELD_OUT = 24  # every 24th answer, a greedy one, is not trained on
MAX_HELD_OUT = 40


class Answer(Struct, frozen=True):
    """A prompt with its answer. start: index of the answer's first token. seconds: of generation until its end."""

    number: int
    tokens: list[int]
    start: int
    seconds: float


def write_answers(
    target: HeadTarget,
    tokenizer: object,
    prompts: Sequence[tuple[list[int], int]],
    journal: Journal,
    enough: Callable[[Sequence[Answer]], bool],
    advance: Callable[[Answer], object],
) -> list[Answer]:
    """Return answers to prompts in their order, as many as time allows. The journal keeps each one.

    Args:
        prompts: tokens, and the maximum number of tokens in the answer.
        enough: returns whether to stop, from the answers so far.
        advance: is called after each new answer.
    """
    done = {int(part): found for part, found in journal.parts.items()}
    left = [number for number in range(len(prompts)) if number not in done]
    before, start = max((each.seconds for each in done.values()), default=0.0), time.monotonic()
    if left and not enough([*done.values()]):
        samplers = make_sampler(0.0), make_sampler(TEMPERATURE, min_p=MIN_P)
        generator = batch_generator(
            target.model,
            tokenizer,
            mode="static" if target.gearbox else "telemetry-only",
            gearbox=target.gearbox or Observer(target.model, "16"),
            completion_batch_size=TOGETHER,
        )
        try:
            chosen = [prompts[number] for number in left]
            own = {"seeds": left, "samplers": [samplers[number % 2] for number in left]}
            uids = generator.insert([list(tokens) for tokens, _ in chosen], [most for _, most in chosen], **own)
            numbers = dict(zip(uids, left))
            written = {uid: list(tokens) for uid, (tokens, _) in zip(uids, chosen)}
            while written and not enough([*done.values()]):
                for response in generator.next_generated():
                    if response.error is not None:
                        raise response.error
                    written[response.uid].append(response.token)
                    if response.finish_reason is None:
                        continue
                    number, tokens = numbers[response.uid], written.pop(response.uid)
                    answer = Answer(number, tokens, len(prompts[number][0]), before + time.monotonic() - start)
                    done[number] = answer
                    journal.add(str(number), {name: getattr(answer, name) for name in answer.__struct_fields__})
                    advance(answer)
        finally:
            generator.close()
    return [done[number] for number in sorted(done)]


def divided(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer]]:
    """Return answers to train on and greedy ones to test on, without very short ones.

    Raises:
        GearbxError: one of the two kinds is empty.
    """
    held = [each for each in answers if each.number % HELD_OUT == 0][:MAX_HELD_OUT]
    kinds = [each for each in answers if each.number % HELD_OUT], held
    long = [[each for each in kind if len(each.tokens) - each.start >= SHORTEST] for kind in kinds]
    if not all(long):
        counts = f"{len(long[0])} to train on and {len(long[1])} to test on"
        remedy = "use more prompts or minutes, or a larger --max-tokens"
        raise GearbxError(f"draft-head: too few answers of {SHORTEST} tokens or more, got {counts}; {remedy}")
    return long[0], long[1]
