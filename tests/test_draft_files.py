"""Drafting files: written by calibrate, found, refused."""

import json

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm import convert
from mlx_lm.models.cache import (
    make_prompt_cache,
)

from gearbx_mlx import Gearbox, entropy_bits
from gearbx_mlx.decoding.draft_plans import find_rule, shipped
from gearbx_mlx.decoding.draft_trials import record_agreement
from gearbx_mlx.decoding.drafting import looking, second_head
from gearbx_mlx.loading import DEMO_MODEL
from gearbx_mlx.routing.acceptance import parse_draft_file

QUESTION = "Question: Tom has 5 apples and buys 7 more. How many apples does he have?\nAnswer:"
TALE = "Once upon a time there was a king who"


class TestDraftingFiles:
    @pytest.mark.slow
    def test_what_ships_is_for_the_demo_model(self, fresh_demo):
        for made in shipped():
            gears = ",".join(map(str, made.gears))
            gearbox = Gearbox(mlx_lm.load(str(fresh_demo.path))[0], gears)
            rule, draft = find_rule(gearbox)
            assert (rule.bound, draft) == (made.bound, made.draft)

    def test_another_model_drafts_by_the_rule_for_any(self, tiny):
        rule, draft = find_rule(Gearbox(tiny))
        assert rule.bound == 0.5
        assert rule.agreement(4.0) == 0.5
        assert draft is None

    def test_recorded_agreement_is_that_of_single_steps(self, geared_demo, demo):
        prompt = demo.tokenizer.encode(QUESTION)
        geared_demo.shift("high")
        text = [r.token for r in mlx_lm.stream_generate(demo.model, demo.tokenizer, prompt, 8)]
        low, top = geared_demo.ladder
        (found,) = record_agreement(geared_demo, top, [low], prompt, text)
        # Within one block the low gear attends to its own entries, as it does in a draft.
        cache = make_prompt_cache(demo.model)
        demo.model(mx.array(prompt[:-1])[None], cache=cache)
        geared_demo.shift("low")
        for token, wanted, entropy, agrees in zip([prompt[-1], *text], text, found.entropies, found.agrees):
            with looking(second_head(geared_demo, low)):
                logits = demo.model(mx.array([[token]]), cache=cache)[0, -1]
            assert entropy == pytest.approx(entropy_bits(logits).item(), abs=1e-4)
            assert agrees == (mx.argmax(logits).item() == wanted)

    @pytest.mark.slow
    def test_from_calibrate_to_generate(self, command, tmp_path):
        file, summary, trace = tmp_path / "d.json", tmp_path / "s.json", tmp_path / "t.jsonl"
        done = command("calibrate", "--mode", "lossless", "--gears", "3,5,16", "-m", 20, "--out", file)
        assert done.status == 0
        made = parse_draft_file(file.read_text())
        assert (made.gears, made.vocab_size, made.tokens) == ([3, 5, 16], 4096, 60)
        assert made.draft in (3, 5)
        assert made.weight_bytes_per_token <= made.weight_bytes_per_token_top
        done = command(
            "generate", "--mode", "lossless", "--curve", file, "-m", 30, "--summary", summary, "--trace", trace
        )
        assert done.status == 0
        told = json.loads(summary.read_text())
        rows = [json.loads(line) for line in trace.read_text().splitlines()]
        assert told["mode"] == "lossless"
        assert [gear["bits"] for gear in told["ladder"]] == [3, 5, 16]
        assert told["drafted"] == sum(row["drafted"] for row in rows)
        assert told["accepted"] == sum(row["from_draft"] for row in rows)
        assert told["acceptance_rate"] == pytest.approx(told["accepted"] / told["drafted"])
        assert told["verifications"] + told["accepted"] + told["lookup_accepted"] == told["tokens"] == 30
        assert told["weight_bytes_per_token"] == pytest.approx(np.mean([row["weight_bytes"] for row in rows]))
        assert f"{told['drafted']}, {told['accepted']} accepted" in done.err

    @pytest.mark.parametrize("mode", ["kickdown", "lossless"])
    def test_a_checkpoint_of_4_bits_has_no_gears_to_compare(self, command, tmp_path, monkeypatch, mode):
        monkeypatch.chdir(tmp_path)
        convert(str(DEMO_MODEL), str(tmp_path / "q"), quantize=True)
        done = command("calibrate", "--model", tmp_path / "q", "--mode", mode, "-m", 3, "--ignore-chat-template")
        assert done.status == 2
        assert "quantized already" in done.err

    @pytest.mark.slow
    def test_text_is_that_of_the_top_gear(self, command):
        outputs = [
            command("generate", "-m", 40, "--temp", 0.8, "--seed", 5, *arguments).out
            for arguments in (("--mode", "static", "--gears", "3,16"), ("--mode", "lossless"))
        ]
        assert outputs[0] == outputs[1]

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (("--mode", "lossless", "--draft-length", 16), "draft length is 16"),
            (("--mode", "lossless", "--draft-length", 2, "--curve", "x"), "exclude each other"),
            (
                ("--mode", "lossless", "--cost", "time", "--draft-length", 4),
                "--cost and --draft-length exclude each other",
            ),
            (("--mode", "lossless", "--curve", "no such file"), "no such file: cannot be read as a drafting file"),
            (("--mode", "lossless", "--curve", __file__), "not JSON"),
            (("--mode", "route", "--curve", "x"), "--curve is for --mode lossless"),
            (("--mode", "kickdown", "--draft-length", 3), "--draft-length is for --mode lossless"),
            (("--mode", "lossless", "--telemetry-only"), "exclude each other"),
        ],
    )
    def test_mistakes_get_one_line(self, command, arguments, says):
        done = command("generate", "-m", 3, *arguments)
        assert done.status == 2
        assert says in done.err.replace("\n", " ")

    def test_a_file_for_another_model_or_ladder_is_refused(self, command, tmp_path):
        made = next(made for made in shipped() if made.gears == [4, 8, 16])
        ours = tmp_path / "ours.json"
        ours.write_text(made.text())
        done = command("generate", "-m", 3, "--mode", "lossless", "--curve", ours, "--gears", "4,16")
        assert done.status == 2
        assert "made for gears 4,8,16, not 4,16" in done.err
        ours.write_text(made.text().replace(made.fingerprint, "0" * 32))
        done = command("generate", "-m", 3, "--mode", "lossless", "--curve", ours)
        assert done.status == 2
        assert "made for another model" in done.err
