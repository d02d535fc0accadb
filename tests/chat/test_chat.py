"""What a chat reads and answers, turn by turn, and after Ctrl-C."""

import json
import os
import re
import signal
import sys

import mlx.core as mx
import pytest
from chats import ASKED, MODES, MORE, as_without_a_cache, chat, in_gears, tokens_of, with_roles
from conftest import save_model, tiny_model
from mlx_lm.models.cache import load_prompt_cache

from gearbx_mlx import GearbxError
from gearbx_mlx.chat.run import converse, obey
from gearbx_mlx.cli.build import Loaded, decided
from gearbx_mlx.cli.parser import command_settings
from gearbx_mlx.cli.prompt_cache import load_cache
from gearbx_mlx.cli.signals import CtrlC, caught
from gearbx_mlx.decoding.caches import length
from gearbx_mlx.generate import GenerateSettings
from gearbx_mlx.generate.run import to_read
from gearbx_mlx.loading import DEMO_MODEL


@pytest.fixture
def whole(demo, geared_demo):
    return in_gears(demo, geared_demo)


class PressedAfter:
    """Standard output that presses Ctrl-C after some writes, once or several times."""

    def __init__(self, writes: int, times: int = 1):
        self.left, self.times, self.text = writes, times, ""

    def write(self, text: str) -> int:
        self.text += text
        self.left -= 1
        if self.left == 0:
            for _ in range(self.times):
                os.kill(os.getpid(), signal.SIGINT)
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


@pytest.fixture
def pressed(monkeypatch):
    """Press Ctrl-C after so many tokens."""

    def press(tokens: int, times: int = 1) -> PressedAfter:
        out = PressedAfter(tokens, times)
        monkeypatch.setattr(sys, "stdout", out)
        return out

    return press


def said(capsys) -> list[str]:
    """What a chat said beside its answers, but for the word on a cut one."""
    return [line for line in capsys.readouterr().err.splitlines() if not line.startswith("the answer was cut")]


def answers_of(session, *messages: str) -> list[str]:
    for message in messages:
        session.answer(message)
    return [said["content"] for said in session.conversation.turns[1::2]][-len(messages) :]


def type_into(session, *lines: str) -> None:
    """Run commands and answer messages."""
    for line in lines:
        obey(session, line) or session.answer(line)


def test_truncated_answer_suggests_longer_limit_once(capsys):
    """What a chat says beside its answers."""
    with chat(max_tokens=3) as session:
        answers_of(session, ASKED, MORE)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the answer was cut at --max-tokens 3; set more, or -1 for whole answers"
    assert [" 3 generated (cut) " in line for line in lines] == [False, True, True]


class TestTurns:
    @pytest.mark.some(2)
    @pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
    def test_next_answer_equals_uncached_chat(self, whole, capsys, flags):
        with chat(**flags) as session:
            session.answer(ASKED)
            before = list(session.cache.tokens)
            session.answer(MORE)
        read = int(capsys.readouterr().err.splitlines()[-1].split(" prefilled")[0])
        *asked, answered = session.conversation.turns
        prompt = tokens_of(whole, asked)
        assert before == prompt[: len(before)]
        assert read == len(prompt) - len(before)
        answered_in_low = len(before) < len(tokens_of(whole, asked[:1]))  # and not kept
        assert answered_in_low == (flags.get("mode") == "kickdown")
        assert answered["content"] == as_without_a_cache(whole, asked, 24)

    @pytest.mark.some(2)
    @pytest.mark.parametrize("tokens", [1, 7])
    @pytest.mark.parametrize("flags", MODES.values(), ids=MODES)
    def test_next_answer_after_ctrl_c_equals_uncached(self, whole, pressed, capsys, flags, tokens):
        with caught() as ctrl_c, chat(ctrl_c, **flags) as session:
            out = pressed(tokens)
            session.answer(ASKED)
            stopped = session.conversation.turns[-1]["content"]
            assert stopped == out.text.strip()
            assert stopped == as_without_a_cache(whole, session.conversation.turns[:1], 24)[: len(stopped)]
            session.answer(MORE)
        *asked, answered = session.conversation.turns
        assert answered["content"] == as_without_a_cache(whole, asked, 24)
        first, second = said(capsys)
        assert f"{tokens} generated (stopped)" in first
        assert "24 generated (cut)" in second

    def test_second_ctrl_c_keeps_chat_running(self, whole, pressed):
        with caught() as ctrl_c, chat(ctrl_c, gears="16") as session:
            pressed(5, times=2)
            session.answer(ASKED)
            session.answer(MORE)
        *asked, answered = session.conversation.turns
        assert asked[1]["content"]
        assert answered["content"] == as_without_a_cache(whole, asked, 24)

    def test_ctrl_c_between_prefill_parts_keeps_cache(self, whole, capsys):
        class AtTheThirdLook(CtrlC):
            looks = 0

            @property
            def asked(self):
                self.looks += 1
                return self.looks == 3

            @asked.setter
            def asked(self, value):
                pass

        ctrl_c = AtTheThirdLook()
        with chat(ctrl_c, gears="16", prefill_step_size=8) as session:
            session.answer(ASKED)
            assert (session.conversation.turns, capsys.readouterr().out) == ([], "")
            session.answer(ASKED)
        read = int(capsys.readouterr().err.splitlines()[-1].split(" prefilled")[0])
        asked, answered = session.conversation.turns
        assert read < len(whole.tokenizer.encode(ASKED))
        assert answered["content"] == as_without_a_cache(whole, [asked], 24)

    def test_thoughts_dropped_by_template_leave_cache(self, tmp_path, capsys):
        model = tmp_path / "model"
        with_roles(model, "{{ message.content.split('apples')[-1] }}")
        with chat(model=str(model), gears="16") as session:
            session.answer(ASKED)
            session.conversation.turns[-1]["content"] = "I think of apples and say: seven"
            session.answer(MORE)
            written = session.model.tokenizer.decode(session.cache.tokens)
        assert "assistant: and say: seven\n" in written
        assert "think" not in written

    def test_without_a_template_every_turn_is_a_line(self):
        with chat(gears="16", ignore_chat_template=True) as session:
            for line in ("One and", "two"):
                session.answer(line)
            written = session.model.tokenizer.decode(session.cache.tokens, skip_special_tokens=True)
        answers = [said["content"] for said in session.conversation.turns[1::2]]
        assert written.startswith(f"One and\n{answers[0]}\ntwo")

    @pytest.mark.parametrize("architecture", ["mamba", "lfm2", "gemma3_text"])
    def test_models_with_states_and_windows_chat(self, tmp_path, capsys, architecture):
        save_model(tiny_model(architecture, vocab_size=4096), tmp_path / "model")
        for flags in ({"gears": "16"}, {"gears": "4,16", "mode": "lossless"}):
            with chat(model=str(tmp_path / "model"), max_tokens=6, **flags) as session:
                answers = answers_of(session, "one", "two", "three")
                again = session.conversation.turns[:4]
                session.reset()
                session.conversation.turns += again
                assert answers_of(session, "three") == answers[2:]


class TestPipes:
    def test_no_line_ends_the_chat(self, capsys, tmp_path):
        class Typed:
            interactive = False

            def __init__(self, *lines: str):
                self.lines = iter(lines)

            def read(self) -> str | None:
                return next(self.lines, None)

        refused = {
            "/save ~nosuchuser/a.md": "~nosuchuser/a.md: has an unknown home directory; use the full path",
            "/save a\0.md": r"a\x00.md: no file can have a null character in its name; choose another one",
            "/system Be \udcff": "this line: not UTF-8 text (surrogates not allowed); use UTF-8",
            "Be \udcff": "this line: not UTF-8 text (surrogates not allowed); use UTF-8",
            "/": "/: is not a command; use /help for a list, or a space in front for a message",
            "/stats": "/stats: is not a command; use /help for a list, or a space in front for a message",
            "/rest": "/rest: is not a command; use /reset, or a space in front for a message",
            f"/save {tmp_path}/{'n' * 300}.md": "File name too long",
            "/mode route --thresholds a\0": "cannot be read as a thresholds file",
            "/mode telemetry-only": "mode 'telemetry-only': is for original weights, got gears; choose from ",
        }
        with chat(gears="3,16") as session:
            converse(session, Typed(*refused))
        errors = capsys.readouterr().err.splitlines()
        assert len(errors) == len(refused)
        for error, complaint in zip(errors, refused.values()):
            assert error.startswith("error: ")
            assert complaint in error

    def test_stdin_is_validated_before_model_loads(self, command, monkeypatch):
        monkeypatch.setattr("sys.stdin", None)
        monkeypatch.setattr("gearbx_mlx.chat.run.open_model", lambda *_: pytest.fail("the model was loaded"))
        done = command("chat")
        assert (done.status, done.err.count("\n")) == (2, 1)
        assert done.err.startswith("error: standard input: must be open")


class TestCommands:
    def test_gear_holds_gear_and_auto_restores_mode(self, capsys):
        with chat(gears="4,16", mode="route", max_tokens=12) as session:
            type_into(session, "/gear 4", ASKED, "/gear auto", "/gear high", ASKED, "/gear auto", ASKED)
        lines = said(capsys)
        assert lines[:1] == ["every token in gear 4"]
        assert "low 100%" in lines[1]
        assert lines[2:4] == ["mode route", "every token in gear high"]
        assert "high 100%" in lines[4]
        assert lines[5] == "mode route"

    def test_gear_of_a_pair_holds_one_model(self, capsys):
        with chat(small_model=str(DEMO_MODEL), thresholds="1.5", max_tokens=40) as session:
            type_into(session, "/gear small", ASKED, "/gear large", ASKED, "/gear auto", ASKED)
        _, small, _, large, _, both = said(capsys)
        assert "small 100%" in small
        assert "large 100%" in large
        assert re.search(r"small \d\d% large \d\d%", both)

    def test_mode_applies_to_next_answers_with_flags(self, capsys):
        with chat(gears="3,16", mode="static", max_tokens=12) as session:
            for line in ("/mode static --gear low", "/mode lossless --num-draft-tokens 2", "/mode static"):
                type_into(session, line, ASKED)
        lines = said(capsys)
        assert "low 100%" in lines[1]
        assert re.search(r"low \d+% high \d+%", lines[3])  # drafted, and verified
        assert "high 100%" in lines[5]

    @pytest.mark.parametrize("line", ["/mode route", "/mode lossless --num-draft-tokens 2", "/gear low"])
    def test_observed_model_has_single_mode(self, line):
        with (
            chat(mode="telemetry-only") as session,
            pytest.raises(
                GearbxError, match="no layer of this model changes gear, as requested by mode telemetry-only"
            ),
        ):
            obey(session, line)

    def test_reset_starts_new_conversation(self, whole, capsys):
        with chat(gears="16") as session:
            type_into(session, ASKED, "r", MORE)
        asked, answered = session.conversation.turns
        assert answered["content"] == as_without_a_cache(whole, [asked], 24)

    def test_conversation_is_saved(self, tmp_path, capsys):
        with chat(gears="16") as session:
            type_into(session, ASKED, f"/save {tmp_path / 'a b.jsonl'}", f"/save {tmp_path / 'a.md'}")
        said = capsys.readouterr().out.strip()
        lines = (tmp_path / "a b.jsonl").read_text().splitlines()
        messages = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": said}]
        assert [json.loads(line) for line in lines] == messages
        assert (tmp_path / "a.md").read_text() == f"## user\n\n{ASKED}\n\n## assistant\n\n{said}\n"

    @pytest.mark.parametrize("draft", [None, str(DEMO_MODEL)], ids=["alone", "with a draft model"])
    def test_saved_cache_continues_in_generate(self, tmp_path, command, demo, draft):
        file = tmp_path / "cache.safetensors"
        with chat(gears="16", draft_model=draft) as session:
            type_into(session, ASKED, f"/save {file}")
        cache, metadata = load_prompt_cache(str(file), return_metadata=True)
        assert length(cache) == len(session.cache.tokens)
        assert metadata["model"] == str(DEMO_MODEL)
        for there, shown in zip(cache, session.cache.entries):
            assert all(mx.array_equal(a, b) for a, b in zip(there.state, shown.state))
        assert list(tmp_path.iterdir()) == [file]
        done = command("generate", "--prompt-cache-file", file, "-p", MORE, "-m", 8, "--gears", 16)
        assert done.status == 0

    @pytest.mark.parametrize("flags", [{}, {"ignore_chat_template": True}], ids=["template", "lines"])
    def test_generate_after_saved_cache_matches_chat(self, tmp_path, flags):
        """It also reads what the template puts between an answer and the next message."""
        file = tmp_path / "cache.safetensors"
        with chat(gears="16", **flags) as session:
            type_into(session, ASKED, f"/save {file}")
            conversation = session.conversation.tokens(MORE)
            unread = session.cache.unread(conversation)
            held = list(session.cache.tokens)
        settings = command_settings(
            GenerateSettings, {"prompt_cache_file": str(file), "prompt": MORE, "gears": "16"} | flags
        )
        loaded = Loaded.of(decided(settings))
        tokens, entries = to_read(settings, loaded, MORE, load_cache(str(file), None))
        assert tokens == unread
        assert length(entries) == len(held)
        assert held + tokens == conversation
