"""The model's answers that a head learns."""

import mlx.nn as nn
import pytest

from gearbx_mlx.draft_head.answers import Answer, write_answers
from gearbx_mlx.draft_head.target import HeadTarget
from gearbx_mlx.files.journal import Journal


@pytest.mark.parametrize("quantized", [False, True])
def test_answers_follow_prompts_and_are_kept(fresh_demo, tmp_path, quantized):
    if quantized:
        nn.quantize(fresh_demo.model, 64, 4)
    target = HeadTarget(fresh_demo.model, "demo")
    prompts = [([0, *fresh_demo.tokenizer.encode(text)], 5) for text in ("Tom has 3 apples.", "A king", "She")]
    made: list[Answer] = []
    journal = Journal(tmp_path / "journal", {}, Answer)
    found = write_answers(target, fresh_demo.tokenizer, prompts, journal, lambda each: False, made.append)
    assert [each.tokens[: each.start] for each in found] == [tokens for tokens, _ in prompts]
    assert all(0 < len(each.tokens) - each.start <= 5 for each in found)
    assert sorted(made, key=lambda each: each.number) == found
    assert len((tmp_path / "journal").read_text().splitlines()) == 1 + len(prompts)
