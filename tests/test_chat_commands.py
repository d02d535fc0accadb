"""Chats through pipes: what commands do, what is saved, mistakes."""

import json
import subprocess
import sys

import mlx.core as mx
import pytest
from chats import ASKED, MORE, answers, as_without_a_cache, chat, in_gears, piped
from conftest import save_model, tiny_model
from mlx_lm.models.cache import load_prompt_cache, make_prompt_cache, save_prompt_cache

from gearbx_mlx import GearbxError
from gearbx_mlx.chat.run import converse, obey, take
from gearbx_mlx.cli.loaded import Loaded, load_cache
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.decoding.caches import length
from gearbx_mlx.generate import GenerateSettings
from gearbx_mlx.generate.run import to_read
from gearbx_mlx.gone import gone
from gearbx_mlx.loading import DEMO_MODEL

MISSING = "(No such file or directory); check the path and its permissions"


@pytest.fixture(scope="module")
def whole(demo, geared_demo):
    return in_gears(demo, geared_demo)


class TestPipes:
    @pytest.mark.slow
    def test_every_line_is_answered_and_an_empty_one_does_nothing(self):
        done = piped(f"{ASKED}\n\n   \n{MORE}\r\nlast without end")
        assert (done.status, answers(done)) == (0, 3)
        assert done.out.count("\n") >= 3
        assert ">>" not in done.err

    @pytest.mark.slow
    def test_mistakes_are_one_line_each_and_the_chat_goes_on(self):
        done = piped(
            b"\xff\xfe no text\n/geer low\n/gear\n/gear nine\n/mode pair\n/mode rout\n/mode route --thresholds x\n"
            b"/mode static --gear nine\n/mode lossless --curve none.json\n/mode lossless --draft-length 99\n"
            b"/mode static --bogus 1\n/mode static 'a\n/save\n/save a.txt\n/save no/such/a.md\n/save a.safetensors\n"
            b"/\x1b[2J\nq\nnever\n",
            "--mode",
            "static",
        )
        assert (done.status, done.out) == (0, "")
        assert done.err.splitlines() == [
            "error: this line is not UTF-8 text (invalid start byte); convert it",
            "error: /geer: no such command; /gear is near, and a space in front makes it a message",
            "error: /gear needs a gear; choose from auto, low, high",
            "error: no gear 'nine' in the ladder 3,16; choose from 3 (low), 16 (high)",
            "error: mode 'pair': this chat has route, kickdown, lossless, static; start another one with --mode pair",
            "error: mode 'rout' does not exist; choose from route, kickdown, lossless, static",
            f"error: x: cannot be read as a thresholds file {MISSING}",
            "error: --gear: no gear 'nine' in the ladder 3,16; choose from 3 (low), 16 (high)",
            f"error: /mode: {gone('--curve')}",
            "error: --draft-length is 99; give 1 to 15",
            "error: /mode: unrecognized arguments: --bogus 1",
            "error: /mode: No closing quotation; close the quotation",
            "error: /save needs a file name that ends in .md, .jsonl or .safetensors",
            "error: a.txt: what is it to be? end the name in .md, .jsonl or .safetensors (the KV cache)",
            "error: no/such/a.md: there is no directory no/such; make it first",
            "error: a.safetensors: the KV cache is empty; say something first",
            r"error: /\x1b[2J: no such command; /help lists them, and a space in front makes it a message",
        ]

    def test_no_line_ends_the_chat(self, capsys, tmp_path):
        class Typed:
            interactive = False

            def __init__(self, *lines: str):
                self.lines = iter(lines)

            def read(self) -> str | None:
                return next(self.lines, None)

        refused = {
            "/save ~nosuchuser/a.md": "~nosuchuser/a.md: there is no such home directory; write the path in full",
            "/save a\0.md": r"a\x00.md: no file can have a null character in its name; choose another one",
            "/system Be \udcff": "this line is not UTF-8 text (surrogates not allowed); convert it",
            "Be \udcff": "this line is not UTF-8 text (surrogates not allowed); convert it",
            "/": "/: no such command; /help lists them, and a space in front makes it a message",
            "/stats": "/stats: no such command; /help lists them, and a space in front makes it a message",
            "/rest": "/rest: no such command; /reset is near, and a space in front makes it a message",
            f"/save {tmp_path}/{'n' * 300}.md": "File name too long",
            "/mode route --thresholds a\0": "cannot be read as a thresholds file",
            "/mode telemetry-only": "mode 'telemetry-only' is for weights as they are, and these are in gears: ",
        }
        with chat(gears="3,16") as session:
            converse(session, Typed(*refused))
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == len(refused)
        for error, complaint in zip(errors, refused.values()):
            assert error.startswith("error: ")
            assert complaint in error

    def test_an_error_that_no_one_thought_of_is_a_line_too(self, capsys, monkeypatch):
        monkeypatch.delenv("GEARBX_TRACEBACK", raising=False)
        with chat(gears="16") as session:
            monkeypatch.setattr(session.model, "answer", lambda *_, **__: 1 / 0)
            take(session, ASKED)
            monkeypatch.undo()
            take(session, ASKED)
        shown = capsys.readouterr().err.splitlines()
        assert shown[0] == "error: ZeroDivisionError: division by zero (GEARBX_TRACEBACK=1 shows where)"
        assert " written" in shown[1]

    @pytest.mark.slow
    def test_any_blank_ends_the_name_of_a_command(self):
        done = piped("/gear\tlow\n/gear \t high\n")
        assert done.err == "every token in gear low\nevery token in gear high\n"

    @pytest.mark.slow
    def test_a_space_in_front_makes_a_message_of_a_command(self):
        assert answers(piped(" /gear low\n")) == 1

    @pytest.mark.slow
    def test_a_full_context_is_named_and_reset_empties_it(self):
        done = piped(f"{'apples and pears ' * 300}\n{MORE}\n{'word ' * 230}\n{MORE}\nr\n{MORE}\n", "-m", "-1")
        errors = [line for line in done.err.splitlines() if line.startswith("error")]
        assert done.status == 0
        assert errors
        for line in errors:
            assert line.startswith("error: the conversation is ")
            assert line.endswith(" tokens, and the model's context 512; /reset begins a new conversation")
        assert done.err.splitlines()[-2:][0] == "a new conversation begins"
        alone = piped(f"{MORE}\n", "-m", "-1").err.splitlines()[-1]
        assert done.err.splitlines()[-1].split(" written")[0] == alone.split(" written")[0]

    @pytest.mark.slow
    def test_strange_text_is_answered(self):
        done = piped("a\x00b\x07\x1b[31m\u202e é漢🙂 <|endoftext|>\n{{ bos_token }} {% raw %}\n")
        assert (done.status, answers(done)) == (0, 2)

    def test_standard_input_is_looked_at_before_a_model_is_loaded(self, command, monkeypatch):
        monkeypatch.setattr("sys.stdin", None)
        monkeypatch.setattr("gearbx_mlx.chat.run.open_model", lambda *_: pytest.fail("the model was loaded"))
        done = command("chat")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert done.err.startswith("error: standard input is closed")

    @pytest.mark.processes
    def test_closed_standard_input_is_a_users_mistake(self):
        line = f"exec {sys.executable} -m gearbx_mlx.chat <&-"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=300)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == "error: standard input is closed; type into a terminal, or pipe lines into the chat\n"

    @pytest.mark.parametrize("name", ["chat", "generate"])
    def test_flags_of_one_model_are_refused_with_two(self, command, name):
        for flags in (("--prompt-gear", "low"), ("--target-tps", "9"), ("--draft-model", "x")):
            done = command(name, "--small-model", DEMO_MODEL, *flags)
            assert (done.status, done.out) == (2, "")
            assert f"{flags[0]} is for one model; leave it out with --small-model" in done.err


class TestCommands:
    def test_gear_holds_one_gear_and_auto_returns_to_the_mode(self, capsys):
        with chat(gears="4,16", mode="route", max_tokens=12) as session:
            for line in ("/gear 4", ASKED, "/gear auto", "/gear high", ASKED, "/gear auto", ASKED):
                obey(session, line) or session.answer(line)
        lines = capsys.readouterr().err.splitlines()
        assert lines[:1] == ["every token in gear 4"]
        assert "low 100%" in lines[1]
        assert lines[2:4] == ["mode route", "every token in gear high"]
        assert "high 100%" in lines[4]
        assert lines[5] == "mode route"

    def test_mode_changes_the_next_answers_and_its_flags_count(self, capsys):
        with chat(gears="3,16", mode="static", max_tokens=12) as session:
            for line in (
                "/mode static --gear low",
                ASKED,
                "/mode lossless --draft-length 2",
                ASKED,
                "/mode static",
                ASKED,
            ):
                obey(session, line) or session.answer(line)
        lines = capsys.readouterr().err.splitlines()
        assert "low 100%" in lines[1]
        assert " drafts" in lines[3]
        assert "high 100%" in lines[5]

    def test_a_gear_of_a_pair_is_one_of_its_models(self, capsys):
        with chat(small_model=str(DEMO_MODEL), max_tokens=12) as session:
            for line in ("/gear large", ASKED, "/gear small", ASKED, "/gear auto"):
                obey(session, line) or session.answer(line)
        lines = capsys.readouterr().err.splitlines()
        assert "large 100%" in lines[1]
        assert "small 100%" in lines[3]
        assert lines[4] == "mode pair"

    @pytest.mark.parametrize("line", ["/mode route", "/mode lossless --draft-length 2", "/gear low"])
    def test_a_model_that_is_only_observed_has_no_other_mode(self, line):
        with (
            chat(mode="telemetry-only") as session,
            pytest.raises(GearbxError, match="no layer of this model changes gear; mode telemetry-only was asked for"),
        ):
            obey(session, line)

    def test_flags_that_no_answer_can_have_are_refused_before_the_chat(self, command, tmp_path):
        for flags, complaint in (
            (("--mode", "lossless", "--draft-length", "16"), "--draft-length is 16; give 1 to 15"),
            (("--mode", "kickdown", "--draft-model", DEMO_MODEL), "takes no draft model"),
        ):
            done = command("chat", *flags)
            assert (done.status, done.out) == (2, "")
            assert complaint in done.err

    def test_reset_begins_a_new_conversation(self, whole, capsys):
        with chat(gears="16") as session:
            for line in (ASKED, "r", MORE):
                obey(session, line) or session.answer(line)
        asked, answered = session.conversation.turns
        assert answered["content"] == as_without_a_cache(whole, [asked], 24)

    def test_help_names_every_command(self, capsys):
        with chat(gears="16") as session:
            assert obey(session, "h")
        shown = [line.split()[0] for line in capsys.readouterr().err.splitlines()]
        assert shown == ["/gear", "/mode", "/system", "/reset", "/save", "/help", "/exit"]

    def test_what_was_said_is_saved(self, tmp_path, capsys):
        with chat(gears="16") as session:
            for line in (ASKED, f"/save {tmp_path / 'a b.jsonl'}", f"/save {tmp_path / 'a.md'}"):
                obey(session, line) or session.answer(line)
        said = capsys.readouterr().out.strip()
        lines = (tmp_path / "a b.jsonl").read_text().splitlines()
        messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": said}]
        assert [json.loads(line) for line in lines] == messages
        assert (tmp_path / "a.md").read_text() == f"## user\n\n{ASKED}\n\n## assistant\n\n{said}\n"

    @pytest.mark.parametrize("draft", [None, str(DEMO_MODEL)])
    def test_a_saved_cache_is_one_that_generate_goes_on_from(self, tmp_path, command, demo, draft):
        file = tmp_path / "cache.safetensors"
        with chat(gears="16", draft_model=draft) as session:
            session.answer(ASKED)
            obey(session, f"/save {file}")
        cache, metadata = load_prompt_cache(str(file), return_metadata=True)
        assert length(cache) == len(session.cache.tokens)
        assert metadata["model"] == str(DEMO_MODEL)
        for there, shown in zip(cache, session.cache.entries):
            assert all(mx.array_equal(a, b) for a, b in zip(there.state, shown.state))
        assert list(tmp_path.iterdir()) == [file]
        done = command("generate", "--prompt-cache-file", file, "-p", MORE, "-m", 8, "--gears", 16)
        assert done.status == 0

    @pytest.mark.parametrize("flags", [{}, {"ignore_chat_template": True}], ids=["template", "lines"])
    def test_generate_reads_after_a_saved_cache_what_the_chat_would_read(self, tmp_path, flags):
        """It also reads what the template puts between an answer and the next message."""
        file = tmp_path / "cache.safetensors"
        with chat(gears="16", **flags) as session:
            session.answer(ASKED)
            obey(session, f"/save {file}")
            conversation = session.conversation.tokens(MORE)
            unread = session.cache.unread(conversation)
            held = list(session.cache.tokens)
        settings = command_settings(
            GenerateSettings, {"prompt_cache_file": str(file), "prompt": MORE, "gears": "16"} | flags
        )
        loaded = Loaded.of(settings)
        tokens, entries = to_read(settings, loaded, MORE, load_cache(str(file), None))
        assert tokens == unread
        assert length(entries) == len(held)
        assert held + tokens == conversation

    def test_a_state_that_cannot_be_cut_is_read_again_after_it_was_saved(self, tmp_path, command):
        model, file = tmp_path / "model", tmp_path / "cache.safetensors"
        save_model(tiny_model("mamba", vocab_size=4096), model)
        with chat(model=str(model), gears="16", max_tokens=6) as session:
            session.answer("one")
            session.conversation.turns[-1]["content"] = "another text"
            obey(session, f"/save {file}")
            session.answer("two")
        done = command("generate", "--prompt-cache-file", file, "-p", "two", "-m", 6, "--gears", 16)
        assert (done.status, done.out.strip()) == (0, session.conversation.turns[-1]["content"])

    @pytest.mark.parametrize("said", ["[]", "{", '{"before": 1, "templated": true, "tokens": []}'])
    def test_a_saved_conversation_that_is_none_is_refused(self, tmp_path, command, demo, said):
        file = tmp_path / "cache.safetensors"
        metadata = {"model": str(DEMO_MODEL), "tokenizer_config": "{}", "conversation": said}
        save_prompt_cache(str(file), make_prompt_cache(demo.model), metadata)
        done = command("generate", "--prompt-cache-file", file, "-m", 2)
        assert (done.status, done.out) == (2, "")
        assert f"{file}: not a prompt cache (" in done.err

    @pytest.mark.slow
    def test_the_controller_caps_in_a_chat_and_refuses_other_modes(self):
        done = piped(f"{ASKED}\n/mode lossless\n/gear low\n{MORE}\n", "--target-tps", "1000", "--gears", "4,16")
        assert (done.status, answers(done)) == (0, 2)
        assert "watching " in done.err
        assert done.err.count("leave out --target-tps, or use --mode route") == 2
